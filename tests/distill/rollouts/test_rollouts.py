"""Rows are a function of the plan and the shard number, and a shard with its name is whole."""

import os
import time
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from stores import PLAN, fill, make_writer, rows_of
from workbench import SPECIAL, fork, make_target

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.rollouts import store as rollouts
from distill.rollouts.estimate import estimate
from distill.rollouts.store import RolloutPlan, RolloutStore


def test_shards_hold_every_prompt_once_and_the_self_written_ones(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    fill(store, writer)
    assert store.shards == 4  # 9 prompts and 5 self-written ones
    names = [row["id"] for shard in rows_of(store) for row in shard]
    assert [n for n in names if n.startswith("p")] == [f"p{i}" for i in range(7)]
    assert not [n for n in names if n.startswith("long")], "a prompt that is too long was kept"
    assert 1 <= len([n for n in names if n.startswith("self")]) <= 5
    assert len(set(names)) == len(names)


def test_rows_are_a_function_of_the_plan_and_the_shard_number(parts, writer, tmp_path):
    straight = RolloutStore(tmp_path / "a", PLAN, parts[2])
    fill(straight, writer)
    want = rows_of(straight)
    broken = RolloutStore(tmp_path / "b", PLAN, parts[2])
    fill(broken, writer)
    for lost in (2, 0):
        broken.path(lost).unlink()
    fill(broken, writer)
    assert rows_of(broken) == want
    files = [sorted(store.folder.glob("*.parquet")) for store in (broken, straight)]
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True)] == [True] * 4
    backwards = {i: writer(i, *broken._work(i)) for i in reversed(range(4))}
    assert [backwards[i] for i in range(4)] == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shard_equals_decoding_its_rows_one_by_one(temperature, parts):
    target, chat, prompts = parts
    plan = replace(PLAN, sampler={"temperature": temperature})
    rows = make_writer(target, chat, plan)(1, prompts[:4], 3)
    assert len(rows) >= 5
    options = {"sampler": Sampler(temperature), "seed": plan.seed, "stop": plan.stop}
    turn = len(chat.encode(({"role": "user", "content": ""},)))
    for row in rows:
        length = row["loss_mask"].count(0)
        assert turn < length <= plan.max_prompt_tokens, "an empty or a long prompt was kept"
        limits = {"max_new_tokens": plan.max_new_tokens, "requests": [row["id"]]}
        (output,) = generate(target, None, [row["tokens"][:length]], **options, **limits).outputs
        assert row["tokens"][length:] == output.tokens
        assert row["loss_mask"] == [0] * length + [1] * len(output.tokens)
        assert row["finish_reason"] == ("stop" if output.stopped else "length")


def test_rows_until_their_length_ignore_end_tokens(parts):
    target, chat, prompts = parts
    plan = replace(PLAN, stop=list(range(3, 80)))  # a random model seldom says <|end|>
    until_end = {row["id"]: row for row in make_writer(target, chat, plan)(1, prompts[:4], 0)}
    stopped = sum(row["finish_reason"] == "stop" for row in until_end.values())
    assert stopped, "no row ended before its length, so this proves nothing"
    plan = replace(plan, until="length")
    rows = make_writer(target, chat, plan)(1, prompts[:4], 3)
    assert [row["id"] for row in rows] == [*until_end, "self-1-0", "self-1-1", "self-1-2"]
    before, _ = chat.user_turn()
    for row in rows:
        assert sum(row["loss_mask"]) == plan.max_new_tokens
        start = until_end[row["id"]]["tokens"] if row["id"] in until_end else before
        assert row["tokens"][: len(start)] == start


def test_other_rows_of_one_plan_are_another_content(parts, writer, tmp_path):
    """Which names what is kept of them, the target's hidden states for example."""
    whole, less = (RolloutStore(tmp_path / name, PLAN, parts[2]) for name in ("whole", "less"))
    fill(whole, writer)
    fill(less, lambda shard, *work: writer(shard, *work)[shard == 0 :])
    assert whole.plan.key == less.plan.key
    assert whole.content() != less.content()


def test_shard_that_was_changed_is_noticed(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    fill(store, writer)
    store.path(1).write_bytes(store.path(0).read_bytes())
    with pytest.raises(UserError, match=r"shard-00001\..*changed"):
        store.check()


def test_every_field_of_a_plan_is_in_its_key():
    sampler = {"temperature": 0.5}
    changes = dict.fromkeys(("config", "tokenizer", "dtype", "template", "answers", "until"), "another")
    changes |= dict.fromkeys(("target", "server", "drafter", "prompts", "moment"), "another")
    changes |= dict.fromkeys(("samples", "self_prompts", "max_prompt_tokens", "max_new_tokens"), 100)
    changes |= dict.fromkeys(("shard_size", "batch_size", "seed"), 100)
    changes |= {"stop": [3, 4], "sampler": sampler, "prompt_sampler": sampler}
    assert changes.keys() == set(RolloutPlan.__dataclass_fields__), "a field the test does not know"
    keys = [replace(PLAN, **{name: value}).key for name, value in changes.items()]
    assert len({PLAN.key, *keys}) == len(changes) + 1


def test_another_targets_rollouts_are_never_reused(parts, tmp_path):
    same = load_target(str(make_target(tmp_path / "same")))
    other = load_target(str(make_target(tmp_path / "other", seed=1)))
    assert same.fingerprint() == parts[0].fingerprint() != other.fingerprint()


def test_given_answers_are_taken_as_they_are(parts):
    target, chat, _ = parts
    plan = replace(PLAN, answers="given", self_prompts=0)
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
    (row,) = make_writer(target, chat, plan)(0, [Prompt.of("a", messages, weight=0.5)], 0)
    assert chat.tokenizer.decode(row["tokens"]) == "{1}hi{2}hello{3}".format(*SPECIAL)
    assert sum(row["loss_mask"]) == len("hello") + 1
    assert (row["finish_reason"], row["ids"], row["weight"]) == ("given", "reencoded", 0.5)


def test_impossible_plans_are_refused(parts):
    target, chat, _ = parts
    for changes, said in (
        ({"answers": "given"}, r"prompts\.self must be 0"),
        ({"until": "dawn"}, "answer or length"),
        ({"max_prompt_tokens": 2}, "no room"),
    ):
        with pytest.raises(UserError, match=said):
            make_writer(target, chat, replace(PLAN, **changes))
    plain = Chat(chat.tokenizer, "none")
    chat.tokenizer.bos_token, start = None, chat.tokenizer.bos_token
    try:
        with pytest.raises(UserError, match="no token to begin a prompt with"):
            make_writer(target, plain, PLAN)
    finally:
        chat.tokenizer.bos_token = start


def test_prompt_that_fills_the_context_is_named(parts):
    """Those that the target cannot read were left out before; a server may read less."""
    target, chat, _ = parts
    plan = replace(PLAN, max_prompt_tokens=10_000, self_prompts=0)
    room = target.max_positions - 2  # without the two tokens of the template
    prompts = [Prompt.of(str(n), ({"role": "user", "content": "x" * n},)) for n in (room - 1, room, room + 1)]
    rows = make_writer(target, chat, plan)(0, prompts[:1], 0)
    assert len(rows[0]["tokens"]) == target.max_positions
    longest = target.max_positions - 1
    said = rf"^p.jsonl:7: {room + 2} tokens, .* reads {longest + 1}, .*prompts.max_tokens={longest} to"
    with pytest.raises(UserError, match=said):
        make_writer(target, chat, plan)(0, [replace(prompts[1], file="p.jsonl", line=7)], 0)


def test_shard_without_rows_is_a_shard(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, replace(PLAN, self_prompts=0), parts[2][-2:])
    fill(store, writer)
    assert rows_of(store) == [[]]
    assert store.manifest()["shards"][0]["rows"] == 0


@pytest.mark.parametrize("end", ["killed", "full disk"])
def test_end_in_the_middle_of_a_shard_loses_no_finished_one(end, parts, writer, tmp_path, monkeypatch):
    straight, store = (RolloutStore(tmp_path / name, PLAN, parts[2]) for name in "ab")
    fill(straight, writer)
    write = pq.write_table

    def broken(table, path):
        if "shard-00002" in path.name:
            path.write_bytes(b"half a shard")
            if end == "killed":
                os.kill(os.getpid(), 9)
            raise OSError(28, "No space left on device")
        write(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(rollouts.pq, "write_table", broken)
        if end == "killed":
            assert fork(lambda: fill(store, writer) or 0) == 9
        else:
            with pytest.raises(OSError, match="No space left"):
                fill(store, writer)
    assert store.missing() == [2, 3]
    assert bool(list(store.folder.glob("shard-00002*.tmp"))) == (end == "killed")
    before = store.path(0).stat().st_mtime_ns
    fill(store, writer)
    assert store.path(0).stat().st_mtime_ns == before, "a finished shard was made again"
    assert rows_of(store) == rows_of(straight)
    assert not list(store.folder.glob("*.tmp"))


def test_two_processes_share_the_shards(parts, tmp_path):
    store = RolloutStore(tmp_path, replace(PLAN, shard_size=2), parts[2])
    log = tmp_path / "log"

    def make(shard, prompts, count):
        with log.open("a") as lines:
            lines.write(f"{os.getpid()} {shard}\n")
        time.sleep(0.05)
        return []

    def rank(number: int):
        os.environ.update(RANK=str(number), WORLD_SIZE="2")
        fill(store, make)
        return 0 if store.complete else 1

    child = os.fork()
    if not child:
        os._exit(rank(1))
    assert fork(lambda: rank(0)) == 0
    assert os.waitpid(child, 0)[1] == 0
    made = [line.split() for line in log.read_text().splitlines()]
    assert sorted(int(shard) for _, shard in made) == list(range(store.shards)), "made twice, or not at all"
    assert len({who for who, _ in made}) == 2
    assert len(store.manifest()["shards"]) == store.shards


def test_shard_that_another_process_holds_is_waited_for(parts, tmp_path):
    store, told = RolloutStore(tmp_path, PLAN, parts[2]), []
    child = os.fork()
    if not child:
        fill(store, lambda *work: time.sleep(0.3) or [])
        os._exit(0)
    while not list(tmp_path.glob("*/shard-*.lock")):
        time.sleep(0.01)
    store.fill(lambda *work: [], told.append)
    assert os.waitpid(child, 0)[1] == 0
    assert store.complete
    assert told[-1] == 0


def test_nothing_to_roll_out_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"prompts.self=0"):
        RolloutStore(tmp_path, replace(PLAN, self_prompts=0), [])


def test_estimate_is_an_upper_bound(parts, writer, tmp_path):
    target, _, prompts = parts
    store = RolloutStore(tmp_path, PLAN, prompts)
    text = estimate(store, target, target.model.lm_head)
    assert "in 14 answers" in text
    bound = int(text.split("up to ")[1].split()[0].replace(",", ""))
    fill(store, writer)
    assert sum(len(row["tokens"]) for shard in rows_of(store) for row in shard) <= bound
    assert "no rollouts to make" in estimate(store, target, target.model.lm_head)


def test_estimated_memory_is_bounded_or_refused(parts, tmp_path, monkeypatch):
    target, _, prompts = parts
    lengths = (10 * target.max_positions, 10**9)
    stores = [RolloutStore(tmp_path, replace(PLAN, max_new_tokens=length), prompts) for length in lengths]
    texts = [estimate(store, target, None) for store in stores]
    assert len({text.rpartition(" MiB for")[0].rpartition(" ")[2] for text in texts}) == 1
    monkeypatch.setattr("distill.rollouts.estimate.memory_bytes", lambda device: 1000)
    with pytest.raises(UserError, match=r"needs up to .* GiB .*; lower rollout.batch_size="):
        estimate(stores[0], target, None)

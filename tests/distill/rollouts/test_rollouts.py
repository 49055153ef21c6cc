"""Rollouts: rows are a function of the plan and the shard number; a shard under its name is whole."""

import hashlib
import json
import os
import time
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from stores import PLAN, fill, make_writer, rows_of
from workbench import SPECIAL, fork, make_target

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target, stop_tokens
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
    assert [f.read_bytes() for f in sorted(broken.folder.glob("*.parquet"))] == [
        f.read_bytes() for f in sorted(straight.folder.glob("*.parquet"))
    ]
    backwards = {i: writer(i, *broken._work(i)) for i in reversed(range(4))}
    assert [backwards[i] for i in range(4)] == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shard_equals_decoding_its_rows_one_by_one(temperature, parts):
    target, chat, prompts = parts
    plan = replace(PLAN, sampler={"temperature": temperature})
    rows = make_writer(target, chat, plan)(1, prompts[:4], 3)
    assert len(rows) >= 5
    for row in rows:
        length = row["loss_mask"].count(0)
        alone = generate(
            target,
            None,
            [row["tokens"][:length]],
            max_new_tokens=plan.max_new_tokens,
            sampler=Sampler(temperature),
            seed=plan.seed,
            requests=[row["id"]],
            stop=plan.stop,
        )
        assert row["tokens"][length:] == alone.outputs[0].tokens
        assert row["finish_reason"] == ("stop" if alone.outputs[0].stopped else "length")


def test_masks_cover_the_answer_and_prompts_stay_within_their_limit(parts, writer):
    _, chat, prompts = parts
    for row in writer(0, prompts[:4], 3):
        length = row["loss_mask"].count(0)
        assert row["loss_mask"] == [0] * length + [1] * (len(row["tokens"]) - length)
        assert length <= PLAN.max_prompt_tokens
        assert 1 <= len(row["tokens"]) - length <= PLAN.max_new_tokens
        assert row["ids"] == "exact"
        if row["id"].startswith("self"):
            before, after = chat.user_turn()
            assert row["tokens"][: len(before)] == before
            assert row["tokens"][length - len(after) : length] == after
            assert length > len(before) + len(after), "an empty self-written prompt was kept"


def test_rows_that_go_on_to_their_length_are_not_ended_by_an_end_token(parts):
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
    with pytest.raises(UserError, match="answer or length"):
        make_writer(target, chat, replace(PLAN, until="dawn"))


def test_the_manifest_counts_and_hashes(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    assert not store.complete
    fill(store, writer)
    assert store.complete
    manifest = store.manifest()
    assert manifest["key"] == PLAN.key == store.folder.name
    assert manifest["plan"]["seed"] == 0
    for shard, rows in zip(manifest["shards"], rows_of(store), strict=True):
        assert shard["rows"] == len(rows)
        assert shard["answer_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
        data = (store.folder / shard["file"]).read_bytes()
        assert shard["sha256"] == hashlib.sha256(data).hexdigest()
    store.check()


def test_other_rows_under_the_same_plan_are_another_content(parts, writer, tmp_path):
    """Which names what is kept of them, the target's hidden states for example."""
    whole, less = (RolloutStore(tmp_path / name, PLAN, parts[2]) for name in ("whole", "less"))
    fill(whole, writer)
    fill(less, lambda shard, *work: writer(shard, *work)[shard == 0 :])
    assert whole.plan.key == less.plan.key
    assert whole.content() != less.content()


def test_a_shard_that_was_changed_is_noticed(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    fill(store, writer)
    store.path(1).write_bytes(store.path(0).read_bytes())
    with pytest.raises(UserError, match=r"shard-00001\..*changed"):
        store.check()


def test_whatever_decides_the_rows_names_the_store():
    changes = {
        "target": "u",
        "config": "d",
        "tokenizer": "l",
        "dtype": "bfloat16",
        "stop": [3, 4],
        "template": "none",
        "answers": "given",
        "server": "m",
        "drafter": "d",
        "prompts": "q",
        "samples": 2,
        "self_prompts": 6,
        "until": "length",
        "sampler": {"temperature": 0.5},
        "prompt_sampler": {"temperature": 0.5},
        "max_prompt_tokens": 25,
        "max_new_tokens": 13,
        "shard_size": 5,
        "batch_size": 4,
        "seed": 1,
        "moment": "2026-11-28T00:00:00",
    }
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
    text = chat.tokenizer.decode(row["tokens"])
    assert text == "{1}hi{2}hello{3}".format(*SPECIAL)
    assert sum(row["loss_mask"]) == len("hello") + 1
    assert (row["finish_reason"], row["ids"], row["weight"]) == ("given", "reencoded", 0.5)


def test_self_written_prompts_that_cannot_be_are_refused(parts):
    target, chat, _ = parts
    with pytest.raises(UserError, match=r"prompts\.self must be 0"):
        make_writer(target, chat, replace(PLAN, answers="given"))
    with pytest.raises(UserError, match="no room"):
        make_writer(target, chat, replace(PLAN, max_prompt_tokens=2))
    plain = Chat(chat.tokenizer, "none")
    chat.tokenizer.bos_token, start = None, chat.tokenizer.bos_token
    try:
        with pytest.raises(UserError, match="nothing to begin a prompt with"):
            make_writer(target, plain, PLAN)
    finally:
        chat.tokenizer.bos_token = start


def test_a_prompt_that_fills_the_context_of_what_answers_is_named(parts):
    """Those that the target cannot read were left out before; a server may read less."""
    target, chat, _ = parts
    plan = replace(PLAN, max_prompt_tokens=10_000, self_prompts=0)
    room = target.max_positions - 2  # besides the two tokens of the template
    prompts = [Prompt.of(str(n), ({"role": "user", "content": "x" * n},)) for n in (room - 1, room, room + 1)]
    rows = make_writer(target, chat, plan)(0, prompts[:1], 0)
    assert len(rows[0]["tokens"]) == target.max_positions
    longest = target.max_positions - 1
    said = rf"^p.jsonl:7: {room + 2} tokens, .* reads {longest + 1}, .*prompts.max_tokens={longest} to"
    with pytest.raises(UserError, match=said):
        make_writer(target, chat, plan)(0, [replace(prompts[1], file="p.jsonl", line=7)], 0)


def test_a_shard_without_rows_is_a_shard(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, replace(PLAN, self_prompts=0), parts[2][-2:])
    fill(store, writer)
    assert rows_of(store) == [[]]
    assert store.manifest()["shards"][0]["rows"] == 0


def test_a_full_disk_leaves_a_store_that_still_opens(parts, writer, tmp_path, monkeypatch):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    write = pq.write_table
    made = []

    def full(table, path):
        if len(made) == 2:
            path.write_bytes(b"half a shard")
            raise OSError(28, "No space left on device")
        made.append(path)
        write(table, path)

    monkeypatch.setattr(rollouts.pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        fill(store, writer)
    assert store.missing() == [2, 3]
    assert not list(store.folder.glob("*.tmp"))
    monkeypatch.undo()
    fill(store, writer)
    assert store.complete
    assert len(rows_of(store)) == 4


def test_a_kill_in_the_middle_of_a_shard_loses_no_finished_one(parts, writer, tmp_path, monkeypatch):
    straight = RolloutStore(tmp_path / "a", PLAN, parts[2])
    fill(straight, writer)
    store = RolloutStore(tmp_path / "b", PLAN, parts[2])
    write = pq.write_table

    def die(table, path):
        if "shard-00002" in path.name:
            path.write_bytes(b"half a shard")
            os.kill(os.getpid(), 9)
        write(table, path)

    monkeypatch.setattr(rollouts.pq, "write_table", die)
    assert fork(lambda: fill(store, writer) or 0) == 9
    monkeypatch.undo()
    assert store.missing() == [2, 3]
    assert list(store.folder.glob("shard-00002*.tmp")), "the kill came too early to prove anything"
    before = store.path(0).stat().st_mtime_ns
    fill(store, writer)
    assert store.path(0).stat().st_mtime_ns == before, "a finished shard was made again"
    assert rows_of(store) == rows_of(straight)
    assert not list(store.folder.glob("*.tmp"))


def test_a_kill_before_the_manifest_is_mended(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    fill(store, writer)
    (store.folder / "manifest.json").unlink()
    assert not store.complete
    fill(store, lambda *work: pytest.fail("a shard was made again"))
    assert store.complete


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


def test_a_shard_that_another_process_holds_is_waited_for(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    told = []
    child = os.fork()
    if not child:

        def slow(shard, prompts, count):
            time.sleep(0.3)
            return []

        fill(store, slow)
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


def test_the_estimate_is_an_upper_bound_of_what_is_made(parts, writer, tmp_path):
    target, _, prompts = parts
    store = RolloutStore(tmp_path, PLAN, prompts)
    text = estimate(store, target, target.model.lm_head)
    assert "in 14 answers" in text
    bound = int(text.split("up to ")[1].split()[0].replace(",", ""))
    fill(store, writer)
    assert sum(len(row["tokens"]) for shard in rows_of(store) for row in shard) <= bound
    assert "no rollouts to make" in estimate(store, target, target.model.lm_head)


def test_more_memory_than_there_is_is_refused(parts, tmp_path, monkeypatch):
    target, _, prompts = parts
    store = RolloutStore(tmp_path, PLAN, prompts)
    monkeypatch.setattr("distill.rollouts.estimate.memory_bytes", lambda device: 1000)
    with pytest.raises(
        UserError, match=r"needs up to .* GiB .*; lower rollout.batch_size=\d+ or rollout.max"
    ):
        estimate(store, target, None)


def test_the_estimate_of_memory_ends_at_the_targets_context(parts, tmp_path):
    target, _, prompts = parts
    assert target.max_positions
    plans = [replace(PLAN, max_new_tokens=length) for length in (10 * target.max_positions, 10**9)]
    texts = [estimate(RolloutStore(tmp_path, plan, prompts), target, None) for plan in plans]
    sizes = [text.rpartition(" MiB for")[0].rpartition(" ")[2] for text in texts]
    assert sizes[0] == sizes[1]


def test_the_target_says_where_answers_end(parts):
    assert stop_tokens(parts[0]) == PLAN.stop
    assert json.dumps(PLAN.stop)


def test_texts_are_the_rows_of_all_shards_in_order(parts, writer, tmp_path):
    store = RolloutStore(tmp_path, PLAN, parts[2])
    fill(store, writer)
    rows = [row for shard in rows_of(store) for row in shard]
    assert [(t.tokens.tolist(), t.loss_mask.tolist()) for t in store.texts()] == [
        (r["tokens"], r["loss_mask"]) for r in rows
    ]
    assert len(rows) > 8

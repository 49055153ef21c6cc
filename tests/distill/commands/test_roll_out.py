"""foredraft rollout: it makes the store that training looks for."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from workbench import Bench, foredraft, make_target

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.sampling import Sampler
from distill.rollouts import produce
from distill.rollouts.shard import write_shard
from distill.rollouts.surprisal import mismatch_warning
from distill.utils import progress
from distill.utils.progress import rank_and_world
from drafters.checkpoint import io as checkpoint_io
from drafters.models.eagle import Eagle


def roll_out(bench: Bench, *more: str):
    """`foredraft rollout` in this process, with what the quick run says of rollouts."""
    given = [a for a in bench.command if a.startswith(("target=", "prompts", "rollout."))]
    argv = [*given, f"stores={bench.root / 'outputs' / 'rollouts'}", *more]
    return foredraft("rollout", *argv)


def test_store_is_made_once_and_training_finds_it(bench):
    first = roll_out(bench).succeeded()
    folder = first.out.splitlines()[-1]
    assert json.loads((bench.root / folder / "manifest.json").read_text())["counts"]["rows"] == 12
    assert f"reusing all 3 shards in {folder}" in roll_out(bench).out
    trained = bench.train("score.enabled=false").succeeded()
    assert f"reusing all 3 shards in {folder}" in trained.out
    roll_out(bench, "rollout.refresh_every=2").refused("refresh_every")


def test_target_that_was_changed_in_place_gets_a_new_store(bench, tmp_path):
    """Fine-tuned under the same path; one element of one layer is enough, or a field of config.json."""
    folder, stores = make_target(tmp_path / "target"), []
    drafter = Eagle.for_target(load_target(str(folder)), depth=1, feature_noise=0.0, feature_weight=1.0)
    (tmp_path / "drafter").mkdir()
    checkpoint_io.save(drafter, load_target(str(folder)), tmp_path / "drafter")

    def is_new() -> bool:
        out = roll_out(bench, f"target={folder}").succeeded().out
        stores.append(out.splitlines()[-1])
        return "reusing all 3 shards" not in out

    is_new()  # another test may have made it
    assert not is_new()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 2] += 0.25
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert is_new()
    with pytest.raises(UserError, match="with other weights"):
        checkpoint_io.load(tmp_path / "drafter", load_target(str(folder)))
    helped = roll_out(bench, f"target={folder}", f"rollout.drafter={tmp_path / 'drafter'}", "decode=chain")
    assert "was trained for other weights" in helped.succeeded().out
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert is_new()
    assert stores[0] == stores[1]
    assert len(set(stores)) == 3


def test_rows_of_somebody_with_ids_of_no_token_are_refused(bench, tmp_path):
    """Before anything counts them: a drafter, its draft vocabulary, or the statistics of a store."""
    folder = tmp_path / "mine"
    stored = f"rollout.store={folder}"
    roll_out(bench, stored).succeeded()
    shard, note = folder / "shard-00000.parquet", folder / "manifest.json"
    for token in (10**6, -5):
        rows = pq.read_table(shard).to_pylist()
        rows[2]["tokens"][-1] = token
        write_shard(shard, rows, json.loads(note.read_text())["key"], 0)
        note.unlink()
        said = f"{shard}: row '{rows[2]['id']}' has token {token}, and the target has "
        bench.train(stored, "drafter.draft_vocab_size=20").refused(said)
        roll_out(bench, stored).refused(said)
        foredraft("inspect-data", f"store={folder}", f"target={bench.target}", "sample=0").refused(said)


@pytest.mark.proof
def test_named_folder_has_the_store_and_the_malformed_records(bench, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(bench.prompts.read_bytes() + b"{\n")
    done = roll_out(bench, f"prompts={bad}", f"rollout.store={tmp_path / 'mine'}").succeeded()
    assert done.out.splitlines()[-1] == str(tmp_path / "mine")
    (line,) = (tmp_path / "mine" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 13
    roll_out(bench, f"rollout.store={tmp_path / 'mine'}", "rollout.temperature=0.5").refused("sampl")


def test_given_answers_are_compared_with_the_target(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(produce, "mismatch_warning", lambda _, rows, plan: f"{len(rows)} {plan['answers']}")
    assert "given" not in roll_out(bench, "seed=1").out
    path = tmp_path / "given.jsonl"
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yo"}] for text in "aab"]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    done = roll_out(bench, "rollout=given", f"prompts={path}").succeeded()
    assert "2 given" in done.out.splitlines(), "one is a duplicate"


def test_warning_for_answers_that_surprise_the_target(tiny_target):
    target = tiny_target(vocab=50)
    plan = {"answers": "given", "sampler": {"temperature": 1.0}}
    out = generate(target, None, [[1, 2]] * 8, max_new_tokens=20, sampler=Sampler(1.0))
    own = [{"tokens": [1, 2, *o.tokens], "loss_mask": [0, 0] + [1] * 20} for o in out.outputs]
    assert mismatch_warning(target, own, plan) is None
    dice = torch.Generator().manual_seed(0)
    strange = [{**row, "tokens": torch.randint(50, (22,), generator=dice).tolist()} for row in own]
    assert "would not write these answers" in str(mismatch_warning(target, strange, plan))
    first = {**plan, "answers": "write", "sampler": {"temperature": 1.0, "top_k": 1}}
    assert "no chance for" in str(mismatch_warning(target, strange, first))


REFUSES = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_prompts_that_the_template_refuses_are_set_aside(tmp_path):
    target = make_target(tmp_path / "target", REFUSES)
    path, held = tmp_path / "p.jsonl", tmp_path / "held.jsonl"
    be, us = (
        [{"role": "system", "content": text}, {"role": "user", "content": "hi"}] for text in ("be", "us")
    )
    for file, records in (
        (path, [{"prompt": "hi 0"}, {"messages": be}, {"prompt": "hi 1"}, {"prompt": "hi 2"}]),
        (held, [{"messages": us}, {"prompt": "hold"}]),
    ):
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    quick = [f"target={target}", f"prompts={path}", f"prompts.heldout={held}", "rollout.max_new_tokens=4"]
    argv = [*quick, "rollout.samples=1", f"rollout.store={tmp_path / 'store'}"]
    done = foredraft("rollout", *argv).succeeded()
    for place, text in (f"{held}:1", "us"), (f"{path}:2", "be"):
        refusal = f"{place}: target: its chat template refuses the prompt '{text}': no system role"
        assert refusal in done.out
    assert "2 of 6 records" in done.out
    assert "3 rows" in done.out
    foredraft("rollout", *argv, "prompts.strict=true").refused(f"{path}:2: ")


@pytest.mark.parametrize(
    ("variables", "lightning", "expected"),
    [
        ({}, None, (0, 1)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None, (1, 4)),
        ({"RANK": "2", "WORLD_SIZE": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None, (2, 3)),
        ({}, (5, 6), (5, 6)),
    ],
)
def test_ranks_are_known_under_every_launcher(monkeypatch, variables, lightning, expected):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rank, world = lightning or (0, 0)
    for name, value in {"is_initialized": bool(lightning), "get_rank": rank, "get_world_size": world}.items():
        monkeypatch.setattr(progress.distributed, name, lambda value=value: value)
    assert rank_and_world() == expected


@pytest.mark.proof
def test_drafter_helps_and_changes_no_row(bench, tmp_path):
    def rows(*more: str) -> list[tuple[str, list[int]]]:
        store = tmp_path / str(len(list(tmp_path.iterdir())))
        roll_out(bench, f"rollout.store={store}", "rollout.samples=2", *more).succeeded()
        table = pq.ParquetDataset(sorted(store.glob("*.parquet"))).read(["id", "tokens"]).to_pylist()
        return [(row["id"], row["tokens"]) for row in table]

    plain = rows()
    assert len(plain) == len({name for name, _ in plain}) == 24
    eagle = bench.untrained_eagle()
    assert rows(f"rollout.drafter={eagle}", "decode=dynamic", "decode.depth=2", "decode.nodes=4") == plain
    assert rows(f"rollout.drafter={eagle}", "rollout.decode=auto") == plain
    older = json.loads((eagle / "config.json").read_text())
    older["target"]["fingerprint"] = "of the target before"
    (eagle / "config.json").write_text(json.dumps(older))
    assert rows(f"rollout.drafter={eagle}", "decode=chain", "decode.depth=2") == plain
    lossy = roll_out(bench, f"rollout.drafter={eagle}", "decode.rule=typical", "decode.lossy=true")
    lossy.refused("one lossless plan")

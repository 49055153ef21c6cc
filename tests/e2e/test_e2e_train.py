"""Whole runs: what they leave, what kills and full disks cannot break, and that a command repeats."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from workbench import ROOT, Bench, Outcome, final, foredraft, leftovers, make_target, ranks, same, weights

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from distill import train as run
from distill.utils.atomic_files import clean
from distill.utils.run_folder import checkpoints
from drafters.checkpoint.atomic import publish
from drafters.checkpoint.io import load
from drafters.models.eagle import Eagle


@pytest.fixture(scope="module")
def straight(bench, tmp_path_factory) -> Path:
    """An undisturbed run: six steps, a save point every two."""
    folder = tmp_path_factory.mktemp("straight")
    bench.run(folder, score__every=2)
    return folder


# -- what a run leaves ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(bench) -> Outcome:
    """The command, run for the first time."""
    return bench.train("seed=11").succeeded()


def test_a_run_leaves_scored_checkpoints_and_says_where(bench, done):
    assert done.err == ""
    folder = done.folder
    dated = str(folder.relative_to(bench.root / "outputs"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(-\d+)?", dated)
    assert (folder / "done").exists()
    assert [p.name for p in checkpoints(folder)] == ["3", "6"]
    files = {"model.safetensors", "config.json", "score.json", "trainer"}
    files |= {f"trainer/{name}" for name in ("state.ckpt", "state.json", "SHA256SUMS")}
    for checkpoint in checkpoints(folder):
        assert {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*")} == files
    assert (folder / "checkpoints" / "last").readlink() == Path("6")
    cards = [json.loads((p / "score.json").read_text()) for p in checkpoints(folder)]
    assert 0 < cards[0]["train_seconds"] < cards[1]["train_seconds"]
    weights = load_file(folder / "checkpoints" / "6" / "model.safetensors")
    assert cards[1]["parameters"] == sum(w.numel() for w in weights.values()) > 0
    # Keys and values of one layer, of the target's two.
    assert 2 * cards[1]["drafter_kv_bytes_per_token"] == cards[1]["kv_bytes_per_token"] > 0
    # By the answers that the headline's tau is not reported on.
    chosen = {str(card["step"]): card["rows"][0]["replay"]["selection_tau"] for card in cards}
    assert chosen[str((folder / "checkpoints" / "best").readlink())] == max(chosen.values())
    assert not leftovers(bench.root)
    assert not list(folder.glob("*.log"))


def test_a_run_reports_its_stages_in_order(done):
    stages = ["for a target of", "run folder: ", "estimate: ", "rollouts: 12 rows", "memory: "]
    stages += [
        "step 3/6 ",
        "step 6/6 ",
        "headline of step .*chain-2, T=0",
        "step ",
        " +3 .*pass",
        " +6 .*pass",
    ]
    for stage, line in zip(stages, done.out.splitlines(), strict=False):
        assert re.match(stage, line), line
    assert "audit pass" in done.out
    assert done.folder.is_dir()


def test_scoring_changes_no_weight(bench, straight, tmp_path):
    bench.run(tmp_path, score__enabled=False, score__every=5)
    assert same(final(straight), final(tmp_path))
    assert not (tmp_path / "checkpoints" / "best").exists()
    assert (tmp_path / "checkpoints" / "last").readlink() == Path("6")


def test_best_follows_replay_on_the_other_prompts(bench, tmp_path, monkeypatch):
    taus = {2: 1.5, 4: 1.9, 6: 1.2}
    score = run.Scorer.__call__

    def card(self, *at):
        found = score(self, *at)
        (row,) = found.rows
        return replace(found, rows=[replace(row, replay=replace(row.replay, selection_tau=taus[at[1]]))])

    monkeypatch.setattr(run.Scorer, "__call__", card)
    bench.run(tmp_path, score__every=2)
    assert (tmp_path / "checkpoints" / "best").readlink() == Path("4")
    assert (tmp_path / "checkpoints" / "last").readlink() == Path("6")


def test_other_drafts_are_timed_for_the_best_and_the_last(bench, tmp_path):
    bench.run(tmp_path, score__every=2, score__alternatives=[{"depth": 1}])
    cards = {path.name: read_scorecard(path / "score.json") for path in checkpoints(tmp_path)}
    full = {"6", (tmp_path / "checkpoints" / "best").readlink().name}
    assert {step for step, card in cards.items() if len(card.rows) == 2} == full
    assert {step for step, card in cards.items() if card.samples} == full
    assert all(card.rows[0].decode == "chain-2" and card.rows[0].replay for card in cards.values())


def test_training_lowers_the_loss(bench, tmp_path):
    bench.run(tmp_path, score__enabled=False, trainer__max_steps=40, optimizer__optimizer__lr=1e-2)
    losses = _losses(tmp_path)
    assert len(losses) == 40
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


# -- other models, other data --------------------------------------------------------------------


def asked(text: str, *answers: str) -> dict:
    turns = [{"role": "user", "content": text}, *({"role": "assistant", "content": a} for a in answers)]
    return {"messages": turns}


def write_records(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.proof
def test_a_base_model_trains_without_a_template(bench, tmp_path):
    target = make_target(tmp_path / "base", template=None)
    done = bench.train(f"target={target}", "prompts.template=none", "prompts.self=3").succeeded()
    assert json.loads((done.folder / "checkpoints" / "best" / "score.json").read_text())["audit_passed"]


@pytest.mark.proof
def test_prompts_longer_than_the_context_are_left_out_and_named(bench, tmp_path):
    texts = [*("x" * (195 + i) for i in range(10)), *(f"say {i}" for i in range(10)), "y" * 300]
    file = write_records(tmp_path / "p.jsonl", *map(asked, texts))
    texts = [*(f"say {i}" for i in range(50, 54)), "z" * 300]
    held = write_records(tmp_path / "h.jsonl", *map(asked, texts))
    done = bench.train(f"prompts={file}", f"prompts.heldout={held}", "rollout.max_new_tokens=4").succeeded()
    assert "rollouts: 20 rows" in done.out
    listed = done.folder / "quarantine.jsonl"
    printed = done.out.splitlines()
    counts = "prompts: 1 of 21 prompts and 1 of 5 held-out prompts"
    limit = "255 tokens (as many as the target reads)"
    first = printed.index(f"{counts} have more than {limit} and are left out, listed in {listed}")
    assert printed[first + 1 : first + 3] == [f"  {file}:21: 302 tokens", f"  {held}:5: 302 tokens"]
    rejected = [json.loads(row) for row in listed.read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rejected] == [(str(file), 21), (str(held), 5)]
    record = json.loads((done.folder / "prompts.json").read_text())
    assert record["too_long"] == {"tokens": 255, "train": 1, "held_out": 1}
    assert (record["train"]["prompts"], record["held_out"]["prompts"]) == (20, 4)


@pytest.mark.parametrize(
    ("options", "reason", "advice"),
    [
        ({"prompts__max_tokens": 15}, "15 tokens (prompts.max_tokens=15)", "raise prompts.max_tokens to 64"),
        ({"max_tokens": 32}, "31 tokens (max_tokens=32)", "raise max_tokens to 65"),
        ({"max_tokens": 32, "rollout__answers": "given"}, "31 tokens (max_tokens=32)", "max_tokens to 65"),
    ],
)
def test_more_than_a_tenth_too_long_is_refused_before_work(bench, tmp_path, options, reason, advice):
    texts = [*(f"q {i}" for i in range(15)), *("x" * n for n in (60, 61, 62))]
    file = write_records(tmp_path / "p.jsonl", *(asked(text, "hello") for text in texts))
    with pytest.raises(UserError, match=r"^prompts: 3 of 18 prompts have more than") as refused:
        bench.run(tmp_path / "stopped", prompts__path=str(file), **options)
    line = str(refused.value)
    parts = (reason, f"{file}:18: 64 tokens", advice, "prompts.max_left_out=0.17 ")
    assert [part for part in parts if part not in line] == []
    assert "\n" not in line
    if "rollout__answers" in options:
        less = {"prompts__max_left_out": 0.17, "score__enabled": False}
        out = bench.run(tmp_path / "run", prompts__path=str(file), **options, **less)
        assert "rollouts: 15 rows" in out
        assert "estimate: no rollouts to make" in out


def test_too_long_held_out_prompt_is_named(bench, tmp_path):
    long = write_records(tmp_path / "long.jsonl", asked("x" * 300))
    bench.train(f"prompts.heldout={long}").refused(f"{long}:1: 302 tokens")


def scoring(bench, checkpoint, *names) -> list[str]:
    """Overrides of `foredraft score` that fit the bench's runs."""
    known = ("target=", "prompts", "score.", "decode")
    return [*(word for word in bench.command if word.startswith(known)), f"checkpoint={checkpoint}", *names]


@pytest.mark.proof
def test_checkpoint_is_rescored_alike_and_refused_for_another_target(bench, straight, tmp_path):
    checkpoint, card = straight / "checkpoints" / "6", tmp_path / "card.json"
    argv = [sys.executable, "-m", "foredraft", "score", *scoring(bench, checkpoint, f"out={card}")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    old, new = json.loads((checkpoint / "score.json").read_text()), json.loads(card.read_text())
    for name in ("audit", "step", "train_seconds"):
        assert old[name] == new[name], name
    for name in ("tau", "tau_interval", "survival", "alpha", "tokens", "rounds", "replay"):
        assert old["rows"][0][name] == new["rows"][0][name], name
    other = make_target(tmp_path / "other", seed=1)
    foredraft("score", *scoring(bench, checkpoint, f"target={other}")).refused("made for target")


@pytest.mark.proof
def test_a_full_audit_draws_every_scored_prompt_several_times(bench, straight, tmp_path):
    places = [f"out={tmp_path / 'card.json'}", f"answers={tmp_path / 'answers'}"]
    argv = scoring(bench, straight / "checkpoints" / "6", *places)
    argv += ["score.temperatures=[0.0,0.8]", "score.plans=[{depth: 2, proposal: sampled}]"]
    done = foredraft("score", *argv, "audit=full").succeeded()
    found = json.loads((tmp_path / "card.json").read_text())["audit"]
    assert found["passed"]
    sampled = [(run["temperature"], run["decode"]) for run in found["sampled"]]
    assert sampled == [(0.8, "chain-2"), (0.8, "chain-2-sampled")]
    # Two prompts of up to six tokens: greedily with both plans, eight draws of each.
    assert 2 * 2 < found["tokens"] <= 2 * 2 * 6
    assert 2 * 2 * 8 < found["sampled_tokens"] <= 2 * 2 * 8 * 6
    assert "T=0.8, chain-2-sampled" in done.out
    foredraft("score", *argv, "audit=all").refused("audit=all: choose quick or full")


# -- several at once -----------------------------------------------------------------------------


@pytest.mark.proof
def test_two_processes_of_one_command_share_its_folder_and_rollouts(tmp_path):
    """They train as one process does: tests/distill/training/test_equivalences.py."""
    bench = Bench(tmp_path / 'it\'s "here", (a=b)')
    options = ["trainer.max_steps=4", "score.every=2", "trainer=ddp", "trainer.devices=2"]
    argv = [sys.executable, "train.py", *bench.command, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not re.search("warn|error", done.stderr, re.IGNORECASE), done.stderr
    (folder,) = bench.runs()
    assert done.stdout.splitlines()[-1] == str(folder)
    assert done.stdout.count("estimate:") == done.stdout.count("run folder:") == 1
    assert (folder / "done").exists()
    assert len(list((bench.root / "outputs" / "rollouts").iterdir())) == 1
    assert not leftovers(bench.root)
    single = {"output_dir": str(tmp_path / "single"), "trainer__max_steps": 1, "score__enabled": False}
    bench.run(tmp_path / "one", **single)
    shards = [
        {p.name: p.read_bytes() for p in root.rglob("shard-*.parquet")}
        for root in (bench.root / "outputs", tmp_path / "single")
    ]
    assert len(shards[0]) == 3
    assert shards[0] == shards[1], "other rollouts than one process makes"


def test_ranks_that_torchrun_starts_share_one_run(bench):
    """With answers so short that no rank has a gradient for the deepest heads."""
    before = bench.runs()
    options = ["trainer=ddp", "trainer.devices=2", "trainer.max_steps=2", "seed=31", "score.enabled=false"]
    options += ["drafter=medusa", "drafter.depth=5", "rollout.max_new_tokens=4"]
    first, second = ranks(2, [*bench.command, *options])
    assert first.code == second.code == 0, first.err + second.err
    (folder,) = [p for p in bench.runs() if p not in before]
    assert (folder / "done").exists()
    assert [p.name for p in checkpoints(folder)] == ["2"]
    assert first.out.count("run folder:") == 1
    assert first.folder == folder
    assert second.out == ""
    trained, start = weights(folder / "checkpoints" / "2"), load_target(str(bench.target)).head.weight
    moved = [not torch.equal(trained[f"lm_heads.{depth}.weight"], start.float()) for depth in range(5)]
    assert moved == [True] * 4 + [False], "a head that no answer reached stays as it was"


def _losses(folder: Path) -> list[float]:
    header, *lines = (line.split(",") for line in (folder / "csv" / "metrics.csv").read_text().splitlines())
    column = header.index("train/loss")
    return [float(line[column]) for line in lines if line[column]]


# -- files ---------------------------------------------------------------------------------------


def test_lightning_reads_its_state_with_weights_only(bench, tmp_path, monkeypatch):
    seen, fit = [], L.Trainer.fit
    monkeypatch.setattr(L.Trainer, "fit", lambda *args, **named: seen.append(named) or fit(*args, **named))
    bench.run(tmp_path, score__enabled=False, trainer__max_steps=1)
    assert seen[0]["weights_only"] is True


def test_cleaning_removes_files_folders_and_links(tmp_path):
    for folder in ("a", "4.tmp/trainer"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("a/b.json.1.tmp", "keep"):
        (tmp_path / file).touch()
    (tmp_path / "best.1.tmp").symlink_to("a")
    clean(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "keep"]


def test_a_published_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "file"
    with publish(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        written = temporary.stat().st_ino
    assert path.stat().st_ino == written, "copied, so that a reader could meet half of it"

    def fail():
        with publish(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert path.read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# -- files of commit a0da26c -------------------------------------------------------------------------

OLDER = ROOT / "tests" / "fixtures" / "run_a0da26c"


@pytest.mark.parametrize("step", ["3", "6"])
def test_a_checkpoint_loads_to_the_last_bit_and_drafts(step, tmp_path):
    target = load_target(str(make_target(tmp_path / "target")))
    drafter = load(OLDER / "checkpoints" / step, target)
    assert type(drafter) is Eagle
    state = drafter.state_dict()
    stored = load_file(OLDER / "checkpoints" / step / "model.safetensors")
    assert same(state, {name: value.to(state[name].dtype) for name, value in stored.items()})
    target.tap(drafter.taps)
    options = {"max_new_tokens": 12, "sampler": Sampler(), "plan": Plan(depth=2)}
    drafted, plain = (generate(target, d, [[1, 60, 61, 2]], **options) for d in (drafter, None))
    assert drafted.outputs[0].tokens == plain.outputs[0].tokens
    assert drafted.outputs[0].drafted


def test_an_older_scorecard_is_named_in_one_line():
    done = foredraft("compare", str(OLDER))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "a scorecard of version 3" in done.err

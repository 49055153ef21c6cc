"""scripts/lab/benchmark.py batch, context, lyanna, scale, scaling, waiting: what they run, write, refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packing import can_pack
from workbench import CONF

from benchmarks import scale, scaling, waiting
from decode.errors import UserError
from decode.kernels import packed_linear
from distill.config.compose import compose
from distill.utils.phase_log import PhaseLog
from distill.utils.run_folder import DONE, checkpoints


@pytest.fixture(scope="module")
def eagle(bench):
    return bench.untrained_eagle()


@pytest.fixture(scope="module")
def lyanna(bench):
    done = bench.train("drafter=lyanna", "score.enabled=false").succeeded()
    return done.folder / "checkpoints" / "last"


# -- batch and context ---------------------------------------------------------------------------


def sweep(bench, name, *more):
    quick = ["score.prompts=2", "score.max_new_tokens=7", "plans.chain.depth=2", "~plans.tree"]
    return bench.benchmark(name, *quick, f"out={bench.root / 'sweep.json'}", *more)


def test_batches_are_compared_with_plain_decoding(bench, eagle):
    done = sweep(bench, "batch", f"checkpoint={eagle}", "batch_sizes=[1,5]").succeeded()
    rows = json.loads((bench.root / "sweep.json").read_text())["rows"]
    cases = [(size, plan) for size in (1, 5) for plan in ("plain", "chain-2")]
    assert [(row["batch_size"], row["decode"]) for row in rows] == cases
    assert all(row["tokens_per_second"] > 0 and 0 < row["verify_share"] < 1 for row in rows)
    for row in rows[::2]:
        assert row["speedup"] == row["speedup_with_prefill"] == row["tau"] == 1
    assert done.out.startswith("batch_size")


def test_every_context_gets_long_and_short_answers(bench, eagle):
    words = ["contexts=[32,64]", "new_tokens=[7,2]"]
    sweep(bench, "context", f"checkpoint={eagle}", *words).succeeded()
    rows = json.loads((bench.root / "sweep.json").read_text())["rows"]
    assert [(row["context"], row["answer"]) for row in rows[::2]] == [(32, 7), (32, 2), (64, 7), (64, 2)]
    assert all(row["speedup_with_prefill"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("batch", ["checkpoint=/nowhere"], "no such folder"),
        ("batch", [], "checkpoint"),
        ("batch", ["checkpoint=/nowhere", "batch_sizes=[0]"], "batch_sizes=[0]: must be at least 1"),
        ("context", ["contexts=[400]", "checkpoint={}"], "the target's context is 256"),
    ],
    ids=str,
)
def test_bad_option_of_a_sweep_is_refused(bench, eagle, name, more, reason):
    sweep(bench, name, *(word.format(eagle) for word in more)).refused(reason)


# -- lyanna --------------------------------------------------------------------------------------


def ablate(bench, *more):
    quick = ["score.replay_prompts=4", "score.max_new_tokens=7", "decode.depth=2", "decode.nodes=4"]
    paths = [f"out={bench.root / 'lyanna.json'}", f"answers={bench.root / 'answers'}"]
    return bench.benchmark("lyanna", *quick, *paths, *more)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_differences_shares_and_head_products_are_written(bench, lyanna, monkeypatch, packed):
    words = ["temperature=1.0", "decode.proposal=fixed"]
    if packed:  # such products are counted too
        if not can_pack(torch.bfloat16):
            pytest.skip("torch cannot pack bf16 on this processor")
        monkeypatch.setattr(packed_linear, "copy_range", lambda *shape: (1, 128))
        words.append("target.dtype=bfloat16")
    done = ablate(bench, f"checkpoint={lyanna}", *words).succeeded()
    card = json.loads((bench.root / "lyanna.json").read_text())
    for arm in ("equal_nodes", "equal_forwards", "fresh_control"):
        difference, (low, high) = card[arm]
        assert low <= difference <= high
    assert 0 <= card["states_reused"] <= 1
    assert 0 <= card["salvage_rate"] <= 1
    assert (card["head_products"], card["prompts"], card["temperature"]) == (1, 4, 1.0)
    assert "\n1 head products a draft" in done.out


def test_drawn_tokens_are_counted_by_the_decoder(bench, lyanna):
    done = ablate(bench, f"checkpoint={lyanna}", "temperature=1.0", "samples=2").succeeded()
    card = json.loads((bench.root / "lyanna.json").read_text())
    assert (card["states_reused"], card["salvage_rate"], card["head_products"]) == (None, None, 1)
    assert "4 prompts, 2 answers each" in done.out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["checkpoint=/nowhere"], "no such folder"),
        (["checkpoint={lyanna}", "decode.width=1", "decode.nodes=2"], "a dynamic tree"),
        (["checkpoint={eagle}"], "the ablation is of drafter=lyanna"),
    ],
)
def test_bad_option_of_the_ablation_is_refused(bench, lyanna, eagle, more, reason):
    done = ablate(bench, *(word.format(lyanna=lyanna, eagle=eagle) for word in more))
    assert done.code != 0
    assert reason in done.err
    assert "Traceback" not in done.err


# -- scale: what a run does before its first step ------------------------------------------------


def test_records_are_all_different(tmp_path):
    scale.write_records(tmp_path / "records.jsonl", turns=2, count=50)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(set(lines)) == 50
    assert [m["role"] for m in json.loads(lines[0])["messages"]] == ["user", "assistant"] * 2


def test_exponents_use_the_two_largest_sizes_and_phases_over_a_second():
    seconds = {n: {"linear": n / 100, "square": n * n / 10000, "short": 0.1} for n in (1000, 10, 100)}
    rows = [{"records": n, "seconds": phases} for n, phases in seconds.items()]
    assert scale.exponents(rows) == pytest.approx({"linear": 1.0, "square": 2.0})
    assert scale.exponents(rows[:1]) == {}


def test_every_phase_is_timed_as_a_run_does_it(tmp_path):
    scale.write_records(tmp_path / "records.jsonl", turns=2, count=40)
    phases = scale.measure(tmp_path, batch_size=5)
    assert [*phases.seconds, "restart"] == list(scale.PHASES)
    assert phases.peak_gib > 0.1
    assert "rollouts: reusing all" in (tmp_path / "output").read_text()


def test_the_table_and_the_file_have_every_size(tmp_path, monkeypatch, capsys):
    def measured(place, turns, count, batch_size):
        seconds = dict.fromkeys(scale.PHASES, count * turns / 10)
        return {"seconds": seconds, "peak_gib": 1.0, "restart_gib": 1.0, "restart_wall": 9.0}

    monkeypatch.setattr(scale, "_measured", measured)
    monkeypatch.setattr(scale.shutil, "rmtree", lambda path, **options: None)
    cfg = compose([f"runs={tmp_path}", f"out={tmp_path / 'out.json'}"], CONF, "lab/scale")
    assert scale.scale(cfg, tmp_path) == pytest.approx(1.0)
    written = json.loads((tmp_path / "out.json").read_text())
    sizes = [(row["turns"], row["records"]) for row in written["rows"]]
    assert sizes == [*((1, 10**n) for n in (3, 4, 5, 6)), *((8, 2 * 10**n) for n in (2, 3, 4, 5))]
    assert written["exponents"]["8"]["read"] == pytest.approx(1.0)
    assert capsys.readouterr().out.count("exponent") == 2


@pytest.mark.proof
def test_a_run_is_restarted_before_its_last_step(tmp_path, monkeypatch):
    run, undo, kept = tmp_path / "size" / "run", scale._undo, []

    def undone(folder, step):
        undo(folder, step)
        kept.append((run / "checkpoints" / "1").stat().st_ino)

    monkeypatch.setattr(scale, "_undo", undone)
    assert scale._measured(tmp_path / "size", 1, 200, 8)["seconds"]["restart"] > 1
    assert (run / DONE).exists()
    assert [path.name for path in checkpoints(run)] == ["1", "2"]
    assert [(run / "checkpoints" / "1").stat().st_ino] == kept


# -- scaling: tokens per second by processes -----------------------------------------------------


def scaled(tmp_path, monkeypatch, speeds, *overrides, code=0) -> tuple[float, list[dict[str, str]]]:
    """The benchmark with runs that log a warm-up and then a speed of each; returns what was started too."""
    started, real = [], subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:  # git, for the commit
            return real(command, **options)
        words = dict(word.split("=", 1) for word in command[2:])
        started.append(words)
        speed = speeds[words["trainer"], int(words["trainer.devices"])].pop(0)
        log = Path(words["hydra.run.dir"].strip("'")) / "csv" / "metrics.csv"
        log.parent.mkdir(parents=True)
        lines = [f"{value},1.5," for value in (1.0, speed - 1, speed, speed + 1)]
        log.write_text("\n".join(["train/tokens_per_second,train/peak_gib,train/loss", *lines, ",,3.0\n"]))
        return subprocess.CompletedProcess(command, code, "", "noise\nerror: no such device\n")

    monkeypatch.setattr(scaling.subprocess, "run", run)
    places = [f"out={tmp_path / 'out.json'}", f"rollouts={tmp_path}", "trainers=[ddp]"]
    return scaling.scaling(compose([*places, *overrides], CONF, "lab/scaling"), tmp_path), started


def test_efficiency_is_relative_to_one_process_of_the_same_turn(tmp_path, monkeypatch, capsys):
    speeds = {("ddp", 1): [100.0, 50.0, 10.0], ("ddp", 2): [150.0, 80.0, 18.0]}
    efficiency, started = scaled(tmp_path, monkeypatch, speeds, "overrides=['drafter=medusa']")
    assert efficiency == pytest.approx(0.8)
    assert [(w["trainer"], w["trainer.devices"]) for w in started] == [("ddp", "1"), ("ddp", "2")] * 3
    assert all(w["drafter"] == "medusa" and w["resume"] == "never" for w in started)
    one, two = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (one["efficiency"], one["tokens_per_second"]) == (1.0, 50.0)
    assert (two["efficiency"], two["tokens_per_second"], two["peak_gib"]) == (0.8, 80.0, 1.5)
    assert "ddp          2        80         80%" in capsys.readouterr().out


def test_a_run_that_fails_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"^benchmark: trainer=ddp on 1 processes: no such device$"):
        scaled(tmp_path, monkeypatch, {("ddp", 1): [1.0]}, code=2)


# -- waiting: rollouts beside busy processes ------------------------------------------------------


def test_each_setting_is_timed_beside_each_number_of_busy_loops(tmp_path, monkeypatch, capsys):
    times = iter([10.0, 12.0, 9.0, 90.0, 14.0, 10.0, 9.0, 50.0, 12.0, 11.0, 9.0, 70.0])
    seen, busy = [], []

    def run(command, **options):
        if command[0] != sys.executable:  # git, for the commit
            return subprocess_run(command, **options)
        seen.append((options["env"].get("GOMP_SPINCOUNT"), len([p for p in busy if p.poll() is None])))
        words = dict(word.split("=", 1) for word in command[2:])
        run_folder = Path(words["hydra.run.dir"].strip("'"))
        run_folder.mkdir()
        PhaseLog(run_folder).add("rollouts", next(times), rows=4)
        return subprocess.CompletedProcess(command, 0, "", "")

    def popen(*given, **options):
        busy.append(subprocess_popen(*given, **options))
        return busy[-1]

    subprocess_run, subprocess_popen = subprocess.run, subprocess.Popen
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # of this process, and of none that is timed
    monkeypatch.setattr(waiting.subprocess, "run", run)
    monkeypatch.setattr(waiting.subprocess, "Popen", popen)
    places = [f"out={tmp_path / 'out.json'}", 'settings=["","GOMP_SPINCOUNT=5"]', "loops=[0,2]"]
    ratio = waiting.waiting(compose(places, CONF, "lab/waiting"), tmp_path)
    assert seen == [(None, 0), ("5", 0), (None, 2), ("5", 2)] * 3
    assert all(process.poll() is not None for process in busy)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["seconds"] for row in rows] == [[10, 14, 12], [12, 10, 11], [9, 9, 9], [90, 50, 70]]
    assert ratio == pytest.approx(1.0)
    assert "70.0 (6.36x)" in capsys.readouterr().out
    with pytest.raises(UserError, match="settings: SPIN: write variables as NAME=VALUE"):
        waiting.environment("SPIN")

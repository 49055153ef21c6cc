"""scripts/lab/benchmark.py scale: its records, what it times, and exponents of growth."""

import json

import pytest
from workbench import CONF

from benchmarks import scale as module
from benchmarks.scale import exponents, measure, scale, write_records
from distill.config.compose import compose
from distill.utils.run_folder import DONE, checkpoints


def test_records_are_all_different(tmp_path):
    write_records(tmp_path / "records.jsonl", turns=2, count=50)
    records = [json.loads(line)["messages"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len({json.dumps(record) for record in records}) == 50
    assert [m["role"] for m in records[0]] == ["user", "assistant"] * 2


def test_exponents_use_the_two_largest_sizes_and_phases_over_a_second():
    seconds = {n: {"linear": n / 100, "square": n * n / 10000, "short": 0.1} for n in (1000, 10, 100)}
    rows = [{"records": n, "seconds": phases} for n, phases in seconds.items()]
    assert exponents(rows) == pytest.approx({"linear": 1.0, "square": 2.0})
    assert exponents(rows[:1]) == {}


def test_every_phase_is_timed_as_a_run_does_it(tmp_path):
    write_records(tmp_path / "records.jsonl", turns=2, count=40)
    phases = measure(tmp_path, batch_size=5)
    assert [*phases.seconds, "restart"] == list(module.PHASES)
    assert phases.peak_gib > 0.1
    assert "rollouts: reusing all" in (tmp_path / "output").read_text()


def test_the_table_and_the_file_have_every_size(tmp_path, monkeypatch, capsys):
    def measured(place, turns, count, batch_size):
        seconds = dict.fromkeys(module.PHASES, count * turns / 10)
        return {"seconds": seconds, "peak_gib": 1.0, "restart_gib": 1.0, "restart_wall": 9.0}

    monkeypatch.setattr(module, "_measured", measured)
    monkeypatch.setattr(module.shutil, "rmtree", lambda path, **options: None)
    cfg = compose([f"runs={tmp_path}", f"out={tmp_path / 'out.json'}"], CONF, "lab/scale")
    assert scale(cfg, tmp_path) == pytest.approx(1.0)
    written = json.loads((tmp_path / "out.json").read_text())
    sizes = [(row["turns"], row["records"]) for row in written["rows"]]
    assert sizes == [*((1, 10**n) for n in (3, 4, 5, 6)), *((8, 2 * 10**n) for n in (2, 3, 4, 5))]
    assert written["exponents"]["8"]["read"] == pytest.approx(1.0)
    assert capsys.readouterr().out.count("exponent") == 2


@pytest.mark.proof
def test_a_run_is_restarted_before_its_last_step(tmp_path, monkeypatch):
    run, undo, kept = tmp_path / "size" / "run", module._undo, []

    def undone(folder, step):
        undo(folder, step)
        kept.append((run / "checkpoints" / "1").stat().st_ino)

    monkeypatch.setattr(module, "_undo", undone)
    assert module._measured(tmp_path / "size", 1, 200, 8)["seconds"]["restart"] > 1
    assert (run / DONE).exists()
    assert [path.name for path in checkpoints(run)] == ["1", "2"]
    assert [(run / "checkpoints" / "1").stat().st_ino] == kept

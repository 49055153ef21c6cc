"""Tests with a marker, counted: scripts/lab/benchmark.py tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from omegaconf import DictConfig

from decode.errors import UserError
from distill.config.validate import check_out
from distill.utils.atomic_files import write_json
from distill.utils.paths import ROOT
from distill.utils.provenance import commit

ENDED = ("failure", "error", "skipped")


def marked(cfg: DictConfig, folder: Path) -> float:
    """Run tests in a process of their own and write each one's outcome as `out`.

    Args:
        cfg: composed from conf/lab/tests.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        The number of tests that passed.

    Raises:
        UserError: pytest wrote no report, or tests failed; then `out` is written too.
    """
    del folder
    check_out(cfg)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "tests.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            cfg.marker,
            f"--junitxml={report}",
            *_files(cfg),
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            raise UserError("benchmark tests: pytest wrote no report; see what it says above")
        cases = list(ElementTree.parse(report).iter("testcase"))
    ended = [(case, _outcome(case)) for case in cases]
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {why}"
        for case, (kind, why) in ended
        if kind == "failed"
    ]
    card: dict[str, Any] = {
        "what": "tests",
        "marker": cfg.marker,
        **{kind: sum(found == kind for _, (found, _) in ended) for kind in ("passed", "failed", "skipped")},
        "failures": failed,
        "reasons": sorted({why for _, (kind, why) in ended if kind == "skipped"}),
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "commit": commit(),
    }
    write_json(Path(cfg.out), card)
    print(f"{card['passed']} passed, {card['failed']} failed, {card['skipped']} skipped")
    if failed:
        raise UserError(f"benchmark tests: {len(failed)} failed, {failed[0]} first")
    return float(card["passed"])


def _files(cfg: DictConfig) -> list[str]:
    """Test files that name the marker, so that others need not be importable; all for an expression.

    Raises:
        UserError: there are none.
    """
    if not str(cfg.marker).isidentifier():
        return list(cfg.tests)
    found = sorted(path for place in cfg.tests for path in (ROOT / place).rglob("test_*.py"))
    if named := [path for path in found if f"mark.{cfg.marker}" in path.read_text()]:
        return [str(path.relative_to(ROOT)) for path in named]
    raise UserError(f"marker={cfg.marker}: no test in {list(cfg.tests)} has it")


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """`passed`, `failed` or `skipped`, and why."""
    found = next((part for part in case if part.tag in ENDED), None)
    if found is None:
        return "passed", ""
    line = next(iter((found.get("message") or "").splitlines()), "")
    return "skipped" if found.tag == "skipped" else "failed", line

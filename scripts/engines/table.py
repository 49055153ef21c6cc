"""Write the table of docs/engines.md from the tests that ran an engine: the end of `make engines`.

A test says its line by the fixture `engine_row`, which pytest's junit files keep, one for each program and
version. Lines of other programs and versions stay as they are on the page. Programs that do not run here are
read by tests that restate their loaders, which this runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import torch

from decode.hardware import hardware
from distill.utils.provenance import commit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "outputs" / "engines"  # see run.py
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NAMES = ("drafter", "`to=`", "engine", "loads", "greedy answers")
NAMES = (*NAMES, "accepted here", "accepted there, noise", "agrees")
RESTATED_MARK = ", restated"
FILES = "tests/drafters/export/test_export"
ENGINE, AUTHORS = f"{FILES}_eagle.py::test_an_engine_computes", f"{FILES}_eagle.py::test_the_authors_eagle"
RESTATED = {  # drafter, `to`, program: the test that compares logits
    ("EAGLE", "sglang", "SGLang 0.5.23"): f"{ENGINE}_the_drafters_logits[eagle without-sglang]",
    ("EAGLE-3", "sglang", "SGLang 0.5.23"): f"{ENGINE}_the_drafters_logits[eagle3.1-sglang]",
    ("EAGLE-3, `fc_norm=false`", "sglang", "SGLang 0.5.23"): f"{ENGINE}_the_drafters_logits[eagle3-sglang]",
    ("EAGLE-3", "authors", "SafeAILab's EAGLE"): f"{AUTHORS}_computes_the_drafters_logits[eagle3]",
}


def main() -> int:
    """Write the page; returns the number of lines that are not as they should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    page, _, after = rest.partition(END)
    lines, runs = [], {}
    for path in sorted(RESULTS.glob("*.xml")):
        found = list(served(path))
        lines += found
        runs |= {engine_of(line): said_of(path) for line in found}
    wrong = [line[0] for line in lines if "NO" in line]
    kept = [line for line in lines_of(page) if engine_of(line) not in runs and RESTATED_MARK not in line[2]]
    runs = {engine: said for engine, said in runs_of(page).items() if engine not in runs} | runs
    again = list(restated())
    wrong += [line[0] for line in again if "NO" in line]
    count = len(lines) + len(again)
    lines = [*sorted([*lines, *kept], key=lambda line: (line[2], line[0])), *again]
    rows = [f"| {' | '.join(line)} |" for line in (NAMES, *lines)]
    rows.insert(1, "|---" * len(NAMES) + "|")
    told = [f"- {engine}: {said}" for engine, said in sorted(runs.items())]
    where = "Written by `make engines`, T=0, fp32:"
    PAGE.write_text("\n".join([f"{before}{BEGIN}", where, "", *told, "", *rows, f"\n{END}{after}"]))
    print(f"{count - len(wrong)} of {count} are served as they were scored", *wrong, sep="\n  ")
    return len(wrong)


def lines_of(page: str) -> list[list[str]]:
    """The cells of the lines that a page has."""
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row[2:-1].split(" | ")] for row in rows[1:]]


def runs_of(page: str) -> dict[str, str]:
    """What a page says of where each of its engines ran."""
    told = [row[2:].partition(": ") for row in page.splitlines() if row.startswith("- ")]
    return {engine: said for engine, _, said in told}


def engine_of(line: list[str]) -> str:
    """Program and version of a line."""
    return line[2].partition(",")[0]


def said_of(path: Path) -> str:
    """Where and how long the tests of a junit file ran."""
    seconds = sum(float(suite.get("time", 0)) for suite in ElementTree.parse(path).iter("testsuite"))
    return (
        f"commit {commit()}, {hardware(torch.device('cpu'))}, {seconds / 60:.0f} minutes, training included"
    )


def served(path: Path) -> Iterator[list[str]]:
    """Lines of the tests that ran an engine, and of others that failed."""
    for test in ElementTree.parse(path).iter("testcase"):
        failed = test.find("failure") is not None or test.find("error") is not None
        told = [
            found.get("value", "") for found in test.iter("property") if found.get("name") == "engine_row"
        ]
        for row in map(json.loads, told):
            begin = [row["drafter"], f"`{row['to']}`", row["engine"], "yes", row["texts"]]
            yield [*begin, row["here"], row["there"], "NO" if failed else "yes"]
        if failed and not told:
            yield [f"`{test.get('name')}`", "", path.stem.replace("-", " ", 1), "NO", "", "", "", ""]


def restated() -> Iterator[list[str]]:
    """Lines of loaders that are restated from their source."""
    for (name, to, program), test in RESTATED.items():
        failed = subprocess.run([sys.executable, "-m", "pytest", "-q", test], cwd=ROOT).returncode
        told = "NO" if failed else "logits within 1e-5"
        yield [name, f"`{to}`", f"{program}{RESTATED_MARK}", "", "", "", "", told]


if __name__ == "__main__":
    raise SystemExit(main())

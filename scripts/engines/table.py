"""Write the table of docs/engines.md from the tests that ran an engine: the end of `make engines`.

A test says its line by the fixture `engine_row`, which pytest's junit files keep. Programs that do not run
here are read by tests that restate their loaders, which this runs.
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
TESTS = ROOT / "outputs" / "engines" / "tests.xml"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NAMES = ("drafter", "`to=`", "engine", "loads", "greedy answers")
NAMES = (*NAMES, "accepted here", "accepted there, noise", "agrees")
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
    lines = [*sorted(served(), key=lambda line: (line[2], line[0])), *restated()]
    rows = [f"| {' | '.join(line)} |" for line in (NAMES, *lines)]
    rows.insert(1, "|---" * len(NAMES) + "|")
    where = f"Written by `make engines` at commit {commit()} on {hardware(torch.device('cpu'))}, T=0, fp32; "
    where += f"its tests took {minutes():.0f} minutes, training included."
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", where, "", *rows, f"\n{END}{after}"]))
    wrong = [line[0] for line in lines if "NO" in line]
    print(f"{len(lines) - len(wrong)} of {len(lines)} are served as they were scored", *wrong, sep="\n  ")
    return len(wrong)


def served() -> Iterator[list[str]]:
    """Lines of the tests that ran an engine, and of others that failed."""
    for test in ElementTree.parse(TESTS).iter("testcase"):
        failed = test.find("failure") is not None or test.find("error") is not None
        told = [
            found.get("value", "") for found in test.iter("property") if found.get("name") == "engine_row"
        ]
        for row in map(json.loads, told):
            begin = [row["drafter"], f"`{row['to']}`", row["engine"], "yes", row["texts"]]
            yield [*begin, row["here"], row["there"], "NO" if failed else "yes"]
        if failed and not told:
            yield [f"`{test.get('name')}`", "", "", "NO", "", "", "", ""]


def minutes() -> float:
    """Wall time of these tests."""
    return sum(float(suite.get("time", 0)) for suite in ElementTree.parse(TESTS).iter("testsuite")) / 60


def restated() -> Iterator[list[str]]:
    """Lines of loaders that are restated from their source."""
    for (name, to, program), test in RESTATED.items():
        failed = subprocess.run([sys.executable, "-m", "pytest", "-q", test], cwd=ROOT).returncode
        told = "NO" if failed else "logits within 1e-5"
        yield [name, f"`{to}`", f"{program}, restated", "", "", "", "", told]


if __name__ == "__main__":
    raise SystemExit(main())

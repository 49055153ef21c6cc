"""Run the proofs, and the tests of the zoo and the laboratory.

A run without a failure, at a commit, writes its part of docs/proofs.md.

Everything that pytest prints is in outputs/proofs.log. A run of given files writes no page.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from decode.hardware import hardware
from distill.utils.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "proofs.md"
LOG, REPORT = (ROOT / "outputs" / name for name in ("proofs.log", "proofs.xml"))
ABOUT = """# Proofs

Tests of minutes, for which CI has no time, and all tests of the zoo and the laboratory, which CI runs where
they changed. `make proofs` and `make long-proofs` write their parts of this page if no test failed and
nothing was uncommitted. Skipped are cases that do not apply, such as sampled nodes of a drafter that makes
none; `pytest -rs` names each reason.
"""


def main(files: list[str], long: bool) -> int:
    """Run pytest, showing its output as it comes; returns its exit code."""
    import torch

    at, code = commit(), run_tests(files, long)
    if files or code:
        return code
    if at.endswith("-dirty"):
        print(f"docs/{PAGE.name} is left as it is: commit your changes, then run the proofs again")
        return code
    suite = ElementTree.parse(REPORT).getroot().find("testsuite")
    assert suite is not None
    part = page_part(suite, f"At commit {at} on {hardware(torch.device('cpu'))}")
    PAGE.write_text(with_part(PAGE.read_text(), "make long-proofs" if long else "make proofs", part))
    return code


def run_tests(files: list[str], long: bool) -> int:
    """Run the proofs; keeps pytest's output and its report in outputs/."""
    chosen = "proof and long" if long else "(proof or zoo or lab) and not long and not gpu and not docs"
    chosen = "proof or zoo or lab" if files else chosen
    command = [sys.executable, "-m", "pytest", "-m", chosen, "-v", "--durations=0", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "worksteal" if long else "loadfile", f"--junitxml={REPORT}", *files]
    LOG.parent.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        LOG.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            log.write(line)
    return run.returncode


def page_part(suite: ElementTree.Element, where: str) -> str:
    """A sum, and a table with a line for each test file.

    Args:
        suite: pytest's report, without failures.
        where: commit and machine, as a sentence begins.
    """
    passed, skipped = Counter[str](), Counter[str]()
    for test in suite.iter("testcase"):
        counts = skipped if test.find("skipped") is not None else passed
        counts[test.get("file", "")] += 1
    minutes = float(suite.get("time", 0)) / 60
    told = f"{passed.total():,} passed, {skipped.total():,} skipped, in {minutes:.0f} minutes."
    rows = [f"| {claim(file)} | `{file}` | {passed[file]} | {skipped[file]} |" for file in sorted(passed)]
    return "\n".join(
        [f"{where}: {told}", "", "| claim | tests | passed | skipped |", "|---|---|---|---|", *rows]
    )


def claim(file: str) -> str:
    """What a test file shows: the first paragraph of its docstring."""
    told = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    return " ".join(told.partition("\n\n")[0].split()).replace("|", "\\|")


def with_part(page: str, command: str, part: str) -> str:
    """The page with this part in place of the one that the same command wrote before."""
    parts = dict(re.findall(r"^## `(.*?)`\n\n(.*?)\s*(?=^## |\Z)", page, re.S | re.M)) | {command: part}
    return "\n".join([ABOUT, *(f"## `{name}`\n\n{parts[name]}\n" for name in sorted(parts, key=len))])


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="test files; none: all")
    parser.add_argument("--long", action="store_true", help="those of more than five minutes only")
    given = parser.parse_args()
    raise SystemExit(main(given.files, given.long))

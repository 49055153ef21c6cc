"""Run the tests marked `proof`, all or those of given files; write output and commit to docs/proofs.md.

A run of all tests replaces the page; one of some files, or of the tests marked `long`, is appended.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from decode.hardware import hardware
from distill.utils.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "proofs.md"


def main(files: list[str], long: bool) -> int:
    """Run pytest, showing its output as it comes; returns its exit code."""
    import torch

    chosen = "proof" if files else "proof and long" if long else "proof and not long"
    command = [sys.executable, "-m", "pytest", "-m", chosen, "-v", "--durations=0", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "worksteal" if long else "loadfile"]
    command += ["--no-header", "--disable-warnings", *files]  # both would print paths of this machine
    at, lines, traced = commit(), [], False  # tracebacks are shown, not kept: they have paths, too
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if line.startswith("====="):  # a part of the report
                traced = " FAILURES " in line or " ERRORS " in line
            begins = line.startswith("tests/") and line.endswith(" \n")  # a test
            if not (traced or begins):
                # A failed test's message may name a path.
                lines.append(
                    line.partition(" - ")[0] + "\n" if line.startswith(("FAILED ", "ERROR ")) else line
                )
    where = f"at commit {at} on {hardware(torch.device('cpu'))}.\n\n```\n{''.join(lines).strip()}\n```\n"
    before = f"{PAGE.read_text()}\n" if files or long else "# Proofs\n\n"
    called = " ".join(["python scripts/proofs.py", *files])
    if not files:
        called = "make long-proofs" if long else "make proofs"
    PAGE.write_text(f"{before}Output of `{called}` {where}")
    return run.returncode


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="test files; none: all")
    parser.add_argument("--long", action="store_true", help="those of more than five minutes alone")
    given = parser.parse_args()
    raise SystemExit(main(given.files, given.long))

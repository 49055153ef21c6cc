"""Run the tests marked `proof`, all or those of given files; write output and commit to docs/proofs.md.

A run of all tests replaces the page; a run of some files is appended.
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


def main(files: list[str]) -> int:
    """Run pytest; returns its exit code."""
    import torch

    command = [sys.executable, "-m", "pytest", "-m", "proof", "-v", "--durations=0", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "loadfile"]
    command += ["--no-header", "--disable-warnings", *files]  # both would print paths of this machine
    at = commit()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    print(done.stdout)
    where = f"at commit {at} on {hardware(torch.device('cpu'))}.\n\n```\n{done.stdout.strip()}\n```\n"
    before = f"{PAGE.read_text()}\n" if files else "# Proofs\n\n"
    called = " ".join(["python scripts/proofs.py", *files]) if files else "make proofs"
    PAGE.write_text(f"{before}Output of `{called}` {where}")
    return done.returncode


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="test files; none: all")
    raise SystemExit(main(parser.parse_args().files))

"""Run the tests marked `proof` and keep their output, with the commit, in docs/proofs.md."""

import os
import subprocess
import sys
from pathlib import Path

from decode.score import hardware
from distill.provenance import commit

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Exit code of pytest."""
    import torch

    command = [sys.executable, "-m", "pytest", "-m", "proof", "-v", "--durations=0", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "loadfile"]
    command += ["--no-header", "--disable-warnings"]  # both have paths of this machine
    at = commit()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    print(done.stdout)
    where = hardware(torch.device("cpu"))
    (ROOT / "docs" / "proofs.md").write_text(
        f"# Proofs\n\nOutput of `make proofs` at commit {at} on {where}.\n\n```\n{done.stdout.strip()}\n```\n"
    )
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())

"""Whether a tier has changed since the last green `make proofs`: python scripts/changed.py zoo | lab.

Exits with 0 if its files, its tests or a file that it imports differ from the commit of docs/proofs.md, or if
that commit is not in this clone; otherwise with 1.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = {
    "zoo": ("src/drafters/zoo", "src/decode/lossy", "src/decode/evaluation/quality.py"),
    "lab": ("scripts/lab", ":!scripts/lab/results"),
}
TESTS = {"zoo": ("tests/drafters/zoo", "tests/decode/lossy"), "lab": ("conf/lab", "tests/lab")}


def main(tier: str) -> int:
    """Print why the tests of a tier have to run, or that they need not; returns the exit code."""
    commit = re.search(r"^At commit (\w+)", (ROOT / "docs" / "proofs.md").read_text(), re.MULTILINE)
    paths = [
        *CODE[tier],
        *TESTS[tier],
        *(imported(ROOT / "src" / "drafters" / "zoo") if tier == "zoo" else ()),
    ]
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit[1] if commit else "", "--", *paths]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"{tier}: the commit of docs/proofs.md is not here, so its tests run")
        return 0
    changed = found.stdout.split()
    print(f"{tier}: {len(changed)} files changed since the last proofs {changed[:5]}")
    return 0 if changed else 1


def imported(folder: Path) -> list[str]:
    """Paths of this project's modules that the modules of a folder import."""
    names = set[str]()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    paths = [Path("src", *name.split(".")).with_suffix(".py") for name in sorted(names)]
    return [str(path) for path in paths if (ROOT / path).is_file()]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))

"""Run tests/engines in the programs that serve drafters, and write their table: `make engines`.

    python scripts/engines/run.py [vllm==0.31.0 vllm==0.32.0 transformers ...]

Each program has an environment of its own, which install.sh makes of <program>.txt, at the version that is
pinned there or at the one that is named. Without arguments all programs run at their pinned versions. The
page keeps the rows of programs and versions that do not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "outputs" / "engines"  # a junit file of each program and version
MORE = {
    "llama_cpp": ("test_advise.py",),
    "vllm": ("test_advise.py", "test_rollout_vllm.py", "test_ray_vllm.py", "test_taps_engine.py"),
}


def main(asked: list[str]) -> int:
    """Run the tests; returns the number of programs some of whose tests failed, and of wrong lines."""
    pinned = sorted(path.stem for path in HERE.glob("*.txt") if "." not in path.stem)
    asked = asked or pinned
    if unknown := [spec for spec in asked if spec.partition("==")[0] not in pinned]:
        print(f"{unknown[0]}: known are {', '.join(pinned)}, each also as <program>==<version>")
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    for old in RESULTS.glob("*.xml"):
        old.unlink()
    failed = [spec for spec in asked if not _passes(spec)]
    table = subprocess.run([sys.executable, HERE / "table.py"], cwd=ROOT).returncode
    print(*(f"failed: {spec}" for spec in failed), sep="\n")
    return len(failed) + table


def _passes(spec: str) -> bool:
    """Whether the tests of a program pass at a version."""
    program, _, version = spec.partition("==")
    found = re.search(r"==(\S+)", (HERE / f"{program}.txt").read_text())
    assert found, "the first package of a list is the program, at a version"
    name = f"{program}-{version or found[1]}"
    install = ["bash", HERE / "install.sh", ROOT / ".engines" / name]
    installed = subprocess.run(install, stdout=subprocess.PIPE, text=True)
    if installed.returncode:
        return False
    # A starting engine imports thousands of modules; with their bytecode written they are compiled once.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {f"FOREDRAFT_{program.upper()}_PYTHON": installed.stdout.strip(), "OMP_NUM_THREADS": "1"}
    tests = ROOT / "tests" / "engines"
    files = [*tests.glob(f"test_{program}*.py"), *(tests / file for file in MORE.get(program, ()))]
    words = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "engine"]
    words += [f"--junitxml={RESULTS / name}.xml", *map(str, sorted(files))]
    return not subprocess.run(words, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

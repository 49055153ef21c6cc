"""Run a part of the tests with the newest releases that pyproject.toml admits, and keep what came of it.

    python scripts/newest.py    or: make newest

They are installed into an environment of their own, without constraints.txt. Versions and outcome go into
docs/newest.json, which tests/repo/test_repository.py compares with pyproject.toml and constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "newest.json"
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "lightning",
    "peft",
    "accelerate",
    "datasets",
    "pyarrow",
    "numpy",
    "hydra-core",
    "deepspeed",
    "ray",
    "openai",
    "gguf",
)
# About a quarter: loading, the probe, decoding, checkpoints, exports, prompts, rollouts, training.
TESTS = (
    "tests/decode/generation",
    "tests/decode/kernels",
    "tests/decode/model",
    "tests/distill/data",
    "tests/distill/engines",
    "tests/distill/prompts",
    "tests/distill/rollouts",
    "tests/distill/test_export.py",
    "tests/distill/test_train.py",
    "tests/distill/training",
    "tests/drafters/checkpoint",
    "tests/drafters/export",
    "tests/e2e/test_e2e_gguf.py",
    "tests/e2e/test_e2e_train.py",
    "tests/foredraft",
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
OFFLINE |= {"TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Install, test, train, write the table; the exit code says whether all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--environment", type=Path, default=ROOT / ".newest", help="folder; made if absent")
    arguments = parser.parse_args()
    python = install(arguments.environment)
    versions = installed(python)
    print(" ".join(f"{name}={version}" for name, version in versions.items()), flush=True)
    tests, failed = run_tests(python)
    quick = run_quick(python)
    table = {
        "date": date.today().isoformat(),
        "commit": output("git", "rev-parse", "--short=8", "HEAD"),
        "python": output(str(python), "-c", "import platform; print(platform.python_version())"),
        "machine": platform.machine(),
        "versions": versions,
        "tests": tests,
        "failed": failed,
        "quick": quick,
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{TABLE.relative_to(ROOT)}: {tests}, experiment=quick: exit {quick['exit']}")
    sys.exit(bool(failed or quick["exit"]))


def install(environment: Path) -> Path:
    """The interpreter of an environment with the newest releases."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    newest = ["--upgrade", "--upgrade-strategy", "eager", "-e", ".[dev]"]
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *newest], cwd=ROOT, check=True)
    return python


def installed(python: Path) -> dict[str, str]:
    """Versions of `PACKAGES`, without a build's name."""
    code = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    found = output(str(python), "-c", code, *PACKAGES).split()
    return {name: version.partition("+")[0] for name, version in zip(PACKAGES, found, strict=True)}


def run_tests(python: Path) -> tuple[dict[str, int], list[str]]:
    """Numbers of `TESTS` by outcome and of all tests that there are, and names of those that failed."""
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        spread = ["-n", "2", "--dist", "loadfile", f"--junitxml={report}"]
        subprocess.run([*pytest, *spread, *TESTS], cwd=ROOT, env=os.environ | OFFLINE, check=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    every = subprocess.run(
        [*pytest, "--collect-only"],
        cwd=ROOT,
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found = re.search(r"(\d+)(?:/\d+)? tests? collected", every)
    return {**counts, "of": int(found[1]) if found else 0}, failed


def run_quick(python: Path) -> dict[str, Any]:
    """Exit code of `experiment=quick`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "train.py", "experiment=quick", f"output_dir={folder}"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | OFFLINE, capture_output=True, text=True, check=False
        )
    print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", flush=True)
    return {"exit": done.returncode}


def output(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()

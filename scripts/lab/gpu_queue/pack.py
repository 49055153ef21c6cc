"""A folder with which the queue runs on a machine without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from decode.errors import UserError
from distill.utils.paths import ROOT
from distill.utils.provenance import PACKED, commit
from gpu_queue.results import DIRTY
from gpu_queue.wheels import wheel_of

MOST = 60 * 2**20  # bytes
# Tracked files that no step reads
LEFT_OUT = ("docs/", "tests/fixtures/", "tests/engines/", "scripts/lab/results/", "scripts/engines/", ".")
# Packages that a machine with torch and transformers may lack, or have in an older version
CARRIED = (
    "transformers",
    "hydra-core",
    "omegaconf",
    "antlr4-python3-runtime",
    "datasets",
    "dill",
    "multiprocess",
    "plotly",
)
SCRIPT = "environment.sh"
ENVIRONMENT = f"""#!/bin/sh
# Runs a command in this folder, with the packages of wheels/, which the first call installs:
#   sh {SCRIPT} python3 scripts/gpu.py run --minutes 9 --out FOLDER
# PYTHON names another interpreter to install for, the one of the command.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
export PYTHONPATH="$here/.packages:$here/src:$here/scripts/lab${{PYTHONPATH:+:$PYTHONPATH}}"
if [ ! -e "$here/.packages/complete" ]; then
  rm -rf "$here/.packages"
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \\
    --no-cache-dir --target "$here/.packages" "$here"/wheels/*.whl
  "$python" -m gpu_queue.requirements "$here/pyproject.toml"
  touch "$here/.packages/complete"
fi
cd "$here"
exec "$@"
"""


def pack(
    folder: Path, also: Sequence[str] = (), files: Sequence[Path] = (), carried: Sequence[str] = CARRIED
) -> int:
    """Write the sources of this commit, wheels, and a script that makes the environment of them.

    Args:
        folder: new, or empty.
        also: installed packages of Python code, for more wheels.
        files: wheels that are carried, too, or in place of those that are made.
        carried: installed packages that wheels are made of.

    Returns:
        Bytes of all files.

    Raises:
        UserError: changes that are not committed, a folder that is not empty, a wheel that cannot be made or
            read, or more than `MOST` bytes; then nothing is left in the folder.
    """
    present = commit()
    if present.endswith(DIRTY):
        raise UserError(
            "pack: there are uncommitted changes; commit them first, since results name their commit"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not an empty folder; give a new one")
    if missing := [str(file) for file in files if file.suffix != ".whl" or not file.is_file()]:
        raise UserError(f"--wheel {missing[0]}: is no wheel file")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in _tracked():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        (folder / PACKED).write_text(f"{present}\n")
        (folder / SCRIPT).write_text(ENVIRONMENT)
        wheels = folder / "wheels"
        wheels.mkdir()
        for file in files:
            shutil.copy2(file, wheels)
        given = {_package(file) for file in files}
        for name in (*carried, *also):
            if re.sub(r"[-_.]+", "_", name).lower() not in given:
                wheel_of(name, wheels)
        return _checked(folder)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _tracked() -> list[str]:
    """Tracked files that the queue needs.

    Raises:
        UserError: this is no clone.
    """
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise UserError("pack: git lists no files here; run it in a clone")
    return [name for name in listed.stdout.split("\0") if name and not name.startswith(LEFT_OUT)]


def _checked(folder: Path) -> int:
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > MOST:
        parts = _parts(folder, sizes.items())
        raise UserError(
            f"pack: {total / 2**20:.1f} MiB, more than {MOST / 2**20:.0f} ({parts}); carry fewer wheels"
        )
    return total


def _package(wheel: Path) -> str:
    """Name of a wheel's package, as file names have it."""
    return re.sub(r"[-_.]+", "_", wheel.name.partition("-")[0]).lower()


def _parts(folder: Path, sizes: Iterable[tuple[Path, int]]) -> str:
    """The largest parts of a folder, for a message."""
    parts: Counter[str] = Counter()
    for path, size in sizes:
        place = path.relative_to(folder)
        parts[_package(path) if place.parts[0] == "wheels" else place.parts[0]] += size
    return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.most_common(4))

"""Trainer states of a run: the two newest, each with hashes of its files, checked before one is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from decode.errors import UserError
from distill.distributed.ranks import PROCESSES_FILE
from distill.utils.atomic_files import sha256
from distill.utils.progress import say
from distill.utils.run_folder import checkpoints

STATE = Path("trainer") / "state.ckpt"  # in a checkpoint: weights, optimizer and schedule
SUMS = "SHA256SUMS"  # next to the state, as `sha256sum --check` reads it
KEPT = 2  # states; the older one is taken where the newest is damaged


def seal(folder: Path) -> None:
    """Record the hashes of all files of a state, once every rank has written its own."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    (folder / SUMS).write_text("".join(f"{sha256(path)}  {path.relative_to(folder)}\n" for path in files))


def has_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has a trainer state, whole or not."""
    state = checkpoint / STATE
    return state.exists() or (state.parent / SUMS).exists()


def newest(run: Path) -> Path | None:
    """The newest undamaged trainer state of a run; None if it has none at all.

    Raises:
        UserError: it has only damaged ones.
    """
    damaged: list[str] = []
    candidates = [path for path in reversed(checkpoints(run)) if has_state(path)]
    for checkpoint in candidates:
        reason = damage(checkpoint / STATE.parent)
        if reason is None:
            for line in damaged:
                say(f"{line}; going on from step {checkpoint.name}, whose trainer state is whole")
            return checkpoint / STATE
        damaged.append(reason)
    if damaged:
        raise UserError(
            f"{damaged[0]}, and no other trainer state is whole; begin a new run from its weights with "
            f"resume=never drafter.init_from={candidates[0]}"
        )
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with a trainer state, as a phrase that names the file; None if it is whole."""
    sums = folder / SUMS
    if not sums.exists():
        return f"{sums}: missing"
    try:
        lines = [line.split("  ", 1) for line in sums.read_text().splitlines()]
        hashes = {folder / name: digest for digest, name in lines}
    except ValueError:
        return f"{sums}: damaged"
    if not {folder / PROCESSES_FILE, folder / STATE.name} <= {p for f in hashes for p in (f, *f.parents)}:
        return f"{sums}: damaged"
    for path, digest in hashes.items():
        if not path.is_file():
            return f"{path}: missing"
        if sha256(path) != digest:
            return f"{path}: damaged (another sha256 than when it was written)"
    return None


def keep_newest(paths: Sequence[Path]) -> None:
    """Remove the trainer states of checkpoints, sorted by step, but for the newest `KEPT`."""
    for checkpoint in [path for path in paths if has_state(path)][:-KEPT]:
        _remove(checkpoint)


def drop_newer(paths: Sequence[Path], step: int) -> None:
    """Remove the trainer states of checkpoints after a step: damaged ones, which the run makes again."""
    for checkpoint in paths:
        if int(checkpoint.name) > step:
            _remove(checkpoint)


def _remove(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / STATE.parent, ignore_errors=True)

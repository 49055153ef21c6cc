"""Results of steps: one JSON file each, and whether it is of this commit and card."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.utils.atomic_files import parse_json, write_json
from gpu_queue.step import Step

DIRTY = "-dirty"


@dataclass(frozen=True)
class Conditions:
    """What a result belongs to.

    Attributes:
        commit: of the code; one with uncommitted changes ends in `DIRTY`.
        hardware: name of the device; "": any, on a machine that only lists or writes pages.
        tiny: whether steps run at a tiny size.
    """

    commit: str
    hardware: str
    tiny: bool


@dataclass(frozen=True)
class Result:
    """Result of one step, as its JSON file has it.

    Attributes:
        step, group, shows: of the step.
        command: as it ran, without the interpreter.
        commit, hardware, tiny: see `Conditions`.
        torch: its version.
        seconds: that the command took.
        failed: why it failed; "": it did not.
        measured: what the command wrote, also if it failed after that.
    """

    step: str
    group: str
    shows: str
    command: list[str]
    commit: str
    hardware: str
    tiny: bool
    torch: str
    seconds: float
    failed: str
    measured: dict[str, Any]

    def of(self, here: Conditions) -> bool:
        """Whether it was measured under these conditions, and need not be measured again.

        Not if the code had uncommitted changes, since they may be others.
        """
        same_card = not here.hardware or self.hardware == here.hardware
        same = self.commit == here.commit and same_card and self.tiny == here.tiny
        return same and not self.commit.endswith(DIRTY)


def path_of(step: Step | str, out: Path) -> Path:
    """File of a step's result."""
    return out / f"{step if isinstance(step, str) else step.name}.json"


def read(path: Path) -> Result | None:
    """The result in a file; None without one.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return Result(**parse_json(path.read_bytes(), step=str, measured=dict))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: no result of a step ({error}); remove it") from None


def write(result: Result, out: Path) -> None:
    """Write a result under its step's name."""
    write_json(path_of(result.step, out), asdict(result))


def state(step: Step, out: Path, here: Conditions) -> str:
    """`done`, `failed` or `missing`, under these conditions."""
    result = read(path_of(step, out))
    if result is None or not result.of(here):
        return "missing"
    return "failed" if result.failed else "done"


def unfinished(steps: Iterable[Step], out: Path, here: Conditions) -> list[Step]:
    """Steps without a result, in their order; those that failed come last."""
    states = [(step, state(step, out, here)) for step in steps]
    return [step for kind in ("missing", "failed") for step, found in states if found == kind]

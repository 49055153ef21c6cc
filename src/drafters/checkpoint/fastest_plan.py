"""The plan that a checkpoint's score found fastest on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard, read_scorecard
from decode.hardware import hardware
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.sampling import Sampler
from drafters.base import Drafter
from drafters.checkpoint.pretrained import SCORES

MOST_NODES = 1024  # of a plan in a file, which may be a stranger's


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest measured plan, plain decoding included.

    Attributes:
        otherwise: the plan where nothing was measured.
    """

    otherwise: Plan

    def choose(self, drafter: Drafter, target: Target, sampler: Sampler, batch: int) -> tuple[Plan, str]:
        """The plan for a sampler and a number of prompts side by side.

        Args:
            drafter: from a checkpoint's folder, which may have a scorecard.
            target: that verifies.
            sampler: of the text.
            batch: number of prompts.

        Returns:
            The plan, and the reason why it is `otherwise`; "" if it was measured.
        """
        try:
            return _measured(drafter, target, sampler, batch), ""
        except UserError as reason:
            drafter.check(self.otherwise)
            return self.otherwise, str(reason)


def _measured(drafter: Drafter, target: Target, sampler: Sampler, batch: int) -> Plan:
    """The plan of the fastest row.

    Raises:
        UserError: nothing was measured under these conditions.
    """
    card = _card(drafter)
    known, here = card.conditions, hardware(target.device)
    if known.hardware != here:
        raise UserError(f"it was scored on {known.hardware or 'an unknown machine'}, this is {here}")
    dtype = str(target.dtype).removeprefix("torch.")
    if known.dtype != dtype:
        raise UserError(f"it was scored in {known.dtype}, the target is in {dtype}")
    rows = [row for row in card.rows if (row.temperature, row.batch_size) == (sampler.temperature, batch)]
    rows = [row for row in rows if not row.lossy and row.speedup and _runs_so(row, target)]
    if not rows:
        raise UserError(f"it was not scored at T={sampler.temperature:g} and batch {batch}{_so(target)}")
    if any(row.plan is None for row in rows):
        raise UserError("its score is from an older version, without the settings of plans")
    best = max(rows, key=lambda row: row.speed)
    if best.speed <= 1:
        return Plan()
    plan = plan_of(best.plan or {})
    if plan.lossy or plan.nodes > MOST_NODES:
        raise UserError(f"its score names plan {plan.name}, which is not for a default")
    drafter.check(plan)
    return plan


def _card(drafter: Drafter) -> Scorecard:
    """The scorecard next to a drafter's files.

    Raises:
        UserError: there is none, it cannot be read, or it is of rounded weights or corrupted inputs.
    """
    folder = drafter.origin.folder if drafter.origin else None
    file = next((folder / name for name in SCORES if (folder / name).is_file()), None) if folder else None
    if file is None:
        raise UserError("the drafter was not scored")
    card = _read(file, file.stat().st_mtime_ns)
    if card.conditions.control != "none" or card.checkpoint.quantize != "none":
        raise UserError("it was scored with other weights or inputs")
    return card


@lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> Scorecard:
    """Read a scorecard that was changed at a time."""
    del changed
    return read_scorecard(file)


def _runs_so(row: Row, target: Target) -> bool:
    """Whether a row's passes ran as the target's will: compiled, captured, or neither."""
    ran = row.timing.passes if row.timing else ""
    captured, compiled = "captured" in ran, ran.endswith("compiled") and ran != "uncompiled"
    return (captured, compiled) == (target.capture, target.compiles)


def _so(target: Target) -> str:
    ways = ["compiled passes"] * target.compiles + ["captured rounds"] * target.capture
    return f" with {' and '.join(ways)}" if ways else ""

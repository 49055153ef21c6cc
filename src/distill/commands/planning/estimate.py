"""What a plan says: time of each phase, disk, memory, and what it assumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distill.scoring.tables import grid


@dataclass(frozen=True)
class Part:
    """One line of the estimate: phase, amount of work, rate of one device, and wall time."""

    name: str
    amount: str
    rate: str
    hours: float


@dataclass(frozen=True)
class Estimate:
    """Time, disk, memory and network traffic of a large run; sizes in GiB.

    Attributes:
        parts: its phases.
        disk, memory: sizes by what they are of; `memory` is of one process.
        sent: that one process sends in a step.
        choices: what the plan chose and assumes, a sentence each.
        tau: what acceptance length to expect, with its source.
        purpose: the run that is planned: drafter, its depth, rows of a step, hidden states.
        command: that starts this run.
    """

    parts: Sequence[Part]
    disk: Mapping[str, float]
    memory: Mapping[str, float]
    sent: float
    choices: Sequence[str] = ()
    tau: str = ""
    purpose: str = ""
    command: str = ""

    @property
    def hours(self) -> float:
        """Wall time."""
        return sum(part.hours for part in self.parts)


def as_text(estimate: Estimate) -> str:
    """Format what is planned, tables of hours, disk and memory, the longest phase, and the command."""
    lines = [[p.name, p.amount, p.rate, _time(p.hours)] for p in estimate.parts]
    lines.append(["all", "", "", _time(estimate.hours)])
    longest = max(estimate.parts, key=lambda part: part.hours)
    share = f"{longest.hours / estimate.hours:.0%}" if estimate.hours else "0%"
    return "\n".join(
        [
            *([f"for: {estimate.purpose}"] if estimate.purpose else []),
            grid(["phase", "amount", "of a device", "time"], lines),
            f"disk: {_sizes(estimate.disk)}",
            f"memory of a process: {_sizes(estimate.memory)}",
            f"bottleneck: {longest.name}, {share} of the time",
            *([f"tau to expect: {estimate.tau}"] if estimate.tau else []),
            *estimate.choices,
            *([f"this run:\n  {estimate.command}"] if estimate.command else []),
        ]
    )


def _time(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 2 else f"{60 * hours:.1f} min"


def _sizes(sizes: Mapping[str, float]) -> str:
    shown = ", ".join(f"{name} {size:,.2f}" for name, size in sizes.items() if size)
    return f"{sum(sizes.values()):,.2f} GiB ({shown})"

"""What loggers share: a protocol, failures that end no run, and what is logged of a scorecard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.loggers import Logger

from distill.utils import redact
from distill.utils.progress import say

COLUMNS = (
    *("drafter", "target", "decode", "rule", "temperature", "batch_size", "nodes"),
    *("replay_tau", "tau", "tau_low", "tau_high", "s_1", "s_2", "s_3", "s_4", "s_5", "acceptance_rate"),
    *("speedup", "tokens_per_second", "plain_tokens_per_second"),
    *("draft_share", "verify_share", "other_share", "ttft", "tpot"),
    *("audit", "lossy", "lossless_to", "prompts", "dtype", "hardware", "seed", "commit"),
)


@runtime_checkable
class Tracker(Protocol):
    """A logger that takes more than numbers."""

    def begin(self) -> None:
        """Be ready, before work that takes long."""
        ...

    def saved(self, folder: Path, checkpoint: Path) -> None:
        """There is a new checkpoint; it may have been scored."""
        ...

    def ended(self, folder: Path) -> None:
        """The run has ended, and its folder is complete."""
        ...


class Careful:
    """What fails here is said once, and from then on left alone.

    Attributes:
        label: how messages call it.
    """

    label = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._off: set[str] = set()

    def _try(self, what: str, work: Callable[[], object]) -> None:
        """Do `work`, unless that failed before for anything that is called the same."""
        if what in self._off:
            return
        try:
            work()
        except Exception as error:  # of a library, a network, a server or a disk that are not the run's
            self._leave(what, error)

    def _leave(self, what: str, error: Exception) -> None:
        self._off.add(what)
        say(f"{self.label}: {redact.reason(error)}; no more {what} go there, and the run goes on")


def trackers(made: Sequence[Logger]) -> list[Tracker]:
    """Those that take more than numbers."""
    return [logger for logger in made if isinstance(logger, Tracker)]


def begin(made: Sequence[Logger]) -> None:
    """Have them ready, and say where they are."""
    for tracker in trackers(made):
        tracker.begin()


def numbers(card: dict[str, Any]) -> dict[str, float]:
    """The headline's, by name."""
    found = {k: v for k, v in card.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if card["replay"]:
        found["replay_tau"] = card["replay"]["tau"]
    found |= {f"survival_{j}": value for j, value in enumerate(card["survival"], 1)}
    found |= {f"target_moved_{name}": value for name, value in (card.get("target_moved") or {}).items()}
    return {f"score/{name}": value for name, value in found.items()}


def rows(card: dict[str, Any]) -> list[list[Any]]:
    """A scorecard as a table: the step and COLUMNS, a row for each setting; None where nothing is known."""
    common = {name: card.get(name) for name in COLUMNS}
    common["audit"] = "pass" if card["audit_passed"] else "FAIL"
    lines = []
    for row in card["rows"]:
        low, high = row["tau_interval"]
        known = common | row | {"tau_low": low, "tau_high": high}
        known["replay_tau"] = row["replay"]["tau"] if row["replay"] else None
        known |= {f"s_{j}": value for j, value in enumerate(row["survival"], 1)}
        lines.append([card["step"], *(known.get(name) for name in COLUMNS)])
    return lines


def setting(row: dict[str, Any]) -> str:
    """A row's name, without what directories cannot have."""
    return f"{row['decode']}, T={row['temperature']:g}, batch {row['batch_size']}".replace("/", "-")


def lengths(row: dict[str, Any]) -> list[int]:
    """How many of the decoder's rounds accepted 0, 1, 2, ... draft tokens."""
    reached = [1.0, *row["survival"], 0.0]
    return [round(row["rounds"] * (a - b)) for a, b in pairwise(reached)]

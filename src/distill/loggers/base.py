"""Shared parts of loggers: a protocol, failures that do not end a run, and logged values of a scorecard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.loggers import Logger

from decode.evaluation.json_records import as_json
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.scoring.served import served_row
from distill.utils import redact
from distill.utils.progress import say

COLUMNS = (
    *("drafter", "target", "decode", "rule", "temperature", "batch_size", "nodes"),
    *("tau", "tau_low", "tau_high", "tau_source", "tau_decoded", "s_1", "s_2", "s_3", "s_4", "s_5"),
    "acceptance_rate",
    *("speedup", "tokens_per_second", "plain_tokens_per_second", "served_tau", "served_speedup"),
    *("draft_share", "verify_share", "other_share", "ttft", "tpot"),
    *("audit", "elsewhere", "lossy", "lossless_to", "prompts", "dtype", "hardware", "seed", "commit"),
)


@runtime_checkable
class Tracker(Protocol):
    """A logger that also takes checkpoints and the report."""

    def begin(self) -> None:
        """Connect, before long work begins."""
        ...

    def saved(self, folder: Path, checkpoint: Path) -> None:
        """Called with each new checkpoint, scored or not."""
        ...

    def ended(self, folder: Path) -> None:
        """Called when the run has ended and its folder is complete."""
        ...


class FailSafe:
    """Mixin: a failure of the logger is reported once per kind of work, which is then skipped.

    Attributes:
        label: name of the logger in messages.
    """

    label = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._off: set[str] = set()

    def _try(self, what: str, work: Callable[[], object]) -> None:
        """Do `work`, unless work of the same name failed before."""
        if what in self._off:
            return
        try:
            work()
        except Exception as error:  # library, network, server or disk; the run continues
            self._turn_off(what, error)

    def _turn_off(self, what: str, error: Exception) -> None:
        self._off.add(what)
        say(f"{self.label}: {redact.reason(error)}; {what} are no longer logged there; the run continues")


def trackers(loggers: Sequence[Logger]) -> list[Tracker]:
    """Loggers that also take checkpoints and the report."""
    return [logger for logger in loggers if isinstance(logger, Tracker)]


def begin(loggers: Sequence[Logger]) -> None:
    """Start the loggers, and print where they log."""
    for tracker in trackers(loggers):
        tracker.begin()


def scalars(card: Scorecard) -> dict[str, float]:
    """Numbers of the headline, of its row and of their conditions, by name.

    `tau`, its interval and `survival_<j>` are the headline's: replayed, if `tau_decoded` is another number.
    Where nothing was replayed there is `tau_decoded` alone.
    """
    row, head, drift = card.compared, card.headline, card.checkpoint.target_drift
    values = {**as_json(row), **as_json(card.conditions), **as_json(card.checkpoint)}
    values = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    values["tau_decoded"] = values.pop("tau")
    if row.replay:
        values |= dict(zip(("tau", "tau_low", "tau_high"), (head.tau, *head.tau_interval), strict=True))
    if card.conditions.elsewhere:
        del values["tau_decoded"]
    if engine := served_row(card, card.compared):
        values |= {"served_tau": engine.tau, "served_agrees": float(engine.agrees)}
        values |= {"served_speedup": engine.speedup} if engine.speedup else {}
    values |= {f"survival_{j}": value for j, value in enumerate(row.acceptance.survival, 1)}
    values |= {f"target_drift_{name}": value for name, value in (as_json(drift) or {}).items()}
    return {f"score/{name}": value for name, value in values.items()}


def rows(card: Scorecard) -> list[list[Any]]:
    """A scorecard as a table: step and COLUMNS, one line per setting; None for missing values."""
    common = {**as_json(card.conditions), **as_json(card.checkpoint)}
    common["audit"] = card.audited
    lines = []
    for row in card.rows:
        source, (low, high) = row.acceptance, row.acceptance.tau_interval
        values = common | as_json(row) | {"tau": source.tau, "tau_low": low, "tau_high": high}
        values |= {"tau_source": row.source, "tau_decoded": None if card.conditions.elsewhere else row.tau}
        if engine := served_row(card, row):
            values |= {"served_tau": engine.tau, "served_speedup": engine.speedup}
        values |= {f"s_{j}": value for j, value in enumerate(row.acceptance.survival, 1)}
        lines.append([card.checkpoint.step, *(values.get(name) for name in COLUMNS)])
    return lines


def setting(row: Row) -> str:
    """A row's name, without slashes."""
    return f"{row.decode}, T={row.temperature:g}, batch {row.batch_size}".replace("/", "-")


def accepted_lengths(row: Row) -> list[int]:
    """Number of the decoder's rounds that accepted 0, 1, 2, ... draft tokens."""
    survival = [1.0, *row.survival, 0.0]
    return [round(row.rounds * (a - b)) for a, b in pairwise(survival)]

"""Where a run's numbers go: a CSV file always, W&B and TensorBoard where the configuration says so.

Every run logs the same under the same names (docs/tracking.md). A tracker that fails, for want of a
network, of a disk or of a server that works, says so in one line and is left alone: no run ends for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import wandb
from lightning.pytorch.loggers import CSVLogger, Logger
from omegaconf import DictConfig

from decode.errors import UserError
from distill.utils import redact
from distill.utils.progress import say
from distill.utils.provenance import commit
from distill.utils.run_folder import checkpoints

WEIGHTS = ("end", "always", "never")
REPORT = "report.html"
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


def loggers(cfg: DictConfig, folder: Path, first_step: int) -> list[Logger]:
    """The CSV file, and what the configuration names beside it.

    Args:
        cfg: with `logger`.
        folder: of the run.
        first_step: that this process makes.

    Raises:
        UserError: a choice that is none, or an extra that is not installed.
    """
    options = cfg.logger
    if options.weights not in WEIGHTS:
        raise UserError(f"logger.weights={options.weights}: choose {', '.join(WEIGHTS)}")
    # The CSV logger begins its file anew, so a resumed run has another.
    part = f"from-{first_step}" if first_step else ""
    made: list[Logger] = [CSVLogger(folder, name="csv", version=part)]
    if options.wandb:
        from distill.loggers.wandb_logger import Wandb

        config = redact.resolved(cfg) | {"commit": commit()}
        made.append(Wandb(folder, options.project, config, options.weights))
    if options.tensorboard:
        if find_spec("tensorboard") is None:
            raise UserError("logger=tensorboard: it is not installed; pip install 'foredraft[tensorboard]'")
        from distill.loggers.tensorboard_logger import TensorBoard

        made.append(TensorBoard(folder, first_step))
    return made


def trackers(made: Sequence[Logger]) -> list[Tracker]:
    """Those that take more than numbers."""
    return [logger for logger in made if isinstance(logger, Tracker)]


def begin(made: Sequence[Logger]) -> None:
    """Have them ready, and say where they are."""
    for tracker in trackers(made):
        tracker.begin()


@contextmanager
def ending() -> Iterator[None]:
    """End what W&B began in here, so that another run of this process does not go on in it."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if wandb.run:
            from distill.loggers.wandb_logger import finish

            finish(failed)


# -- what is logged of a scorecard -----------------------------------------------------------------


def numbers(card: dict[str, Any]) -> dict[str, float]:
    """The headline's, by name."""
    found = {k: v for k, v in card.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if card["replay"]:
        found["replay_tau"] = card["replay"]["tau"]
    found |= {f"survival_{j}": value for j, value in enumerate(card["survival"], 1)}
    found |= {f"target_moved_{name}": value for name, value in (card.get("target_moved") or {}).items()}
    return {f"score/{name}": value for name, value in found.items()}


def cards(folder: Path) -> list[dict[str, Any]]:
    """Scorecards of a run, oldest first."""
    found = [checkpoint / "score.json" for checkpoint in checkpoints(folder)]
    return [json.loads(path.read_text()) for path in found if path.exists()]


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


def best(folder: Path) -> Path | None:
    """The checkpoint that `best` points to."""
    link = folder / "checkpoints" / "best"
    return link.resolve() if link.exists() else None

"""report.html: a run on one page, from the files in its folder."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from markupsafe import Markup

from distill.report import (
    acceptance_panels,
    engine_panel,
    history,
    page,
    panels,
    search_panel,
    text_panels,
    training_panels,
)
from distill.report.bottleneck import bottleneck
from distill.report.history import History
from distill.scoring.tables import target_label
from distill.utils.atomic_files import put
from distill.utils.progress import bar
from distill.utils.redact import reason

log = logging.getLogger(__name__)
NAME = "report.html"


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, finished or not, to `out` (default: report.html in its folder).

    Raises:
        UserError: no run in the folder, unreadable files, or an unwritable `out`.
    """
    place = out or folder / NAME
    put(place, build(history.read(folder)))
    return place


def attempt(folder: Path) -> Path | None:
    """Write the page at the end of a run; a failure is logged and not raised."""
    try:
        with bar(1, NAME, "", leave=False):
            return write(folder)
    except Exception as error:  # files of old or damaged runs can raise anything
        log.error("no %s (%s); foredraft report %s tries again", NAME, reason(error), folder)
        return None


def build(run: History) -> str:
    """Build the document; panels without data are omitted."""
    card = run.card
    parts: list[Markup | None] = []
    if card:
        parts += [page.prose(line)] if (line := bottleneck(card)) else []
        parts += [panels.warnings(card), panels.headline(card), search_panel.families(run), *_measured(run)]
    for title, group in (("Training", training_panels.curves(run)), ("Setup", _origin(run))):
        if any(group):
            parts += [page.heading(title), *group]
    return page.page(_title(run), [part for part in parts if part], _subtitle(run))


def _measured(run: History) -> list[Markup | None]:
    card = run.card
    assert card is not None
    return [
        training_panels.tau(run),
        training_panels.loss(run),
        acceptance_panels.positions(card),
        acceptance_panels.lengths(card),
        panels.shares(card),
        panels.batches(card),
        panels.categories(card),
        panels.settings(card),
        engine_panel.section(card),
        text_panels.samples(card),
    ]


def _origin(run: History) -> list[Markup | None]:
    return [
        panels.about(run.card) if run.card else None,
        panels.machine(run),
        panels.configuration(run),
    ]


def _title(run: History) -> str:
    card = run.card
    return (
        f"{card.checkpoint.drafter} on {target_label(card.checkpoint.target)}"
        if card
        else f"Run {run.folder.resolve().name}"
    )


def _subtitle(run: History) -> str:
    name = "/".join(run.folder.resolve().parts[-2:])
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)) if run.started else ""
    command = f"foredraft train {' '.join(run.overrides)}" if run.overrides else ""
    return " · ".join(part for part in (f"run {name}", when and f"started {when}", command) if part)

"""Entry point of train.py: one run, or with drafter=auto a search over drafter families."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from decode.errors import FollowUpError
from distill.config.read import checked_options
from distill.options.run import SearchOptions, TrainOptions
from distill.report import html, terminal
from distill.search.search import search_families
from distill.train import train
from distill.utils.progress import first_rank
from distill.utils.reports import Reports

REPORTS = Reports(html.attempt, terminal.show)


def run(cfg: DictConfig, folder: Path) -> float:
    """Train one drafter, or with `drafter=auto` search over several families.

    Args:
        cfg: configuration, composed from conf/config.yaml.
        folder: folder of this run, for checkpoints and logs.

    Returns:
        tau of the best checkpoint, 0 if nothing was scored.

    Raises:
        UserError: invalid options, before any work starts; leaves no files.
        FollowUpError: a follow-up step failed, such as an export.
    """
    try:
        if "families" in cfg.drafter:
            tau = search_families(checked_options(SearchOptions, cfg), folder, REPORTS)
        else:
            tau = train(checked_options(TrainOptions, cfg), folder, reports=REPORTS)
    except FollowUpError:
        _places(folder)
        raise
    _places(folder)
    return tau


def _places(folder: Path) -> None:
    if first_rank():
        terminal.places(folder)

"""Score a checkpoint folder again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from distill.config.build import build_target, quiet, read_inputs
from distill.config.validate import check_ranges
from distill.report.compare import earlier
from distill.report.tables import settings_table
from distill.scoring.scorer import Scorer
from distill.utils.atomic_files import write_json
from drafters.checkpoint import io as hub


def score(cfg: DictConfig) -> float:
    """Print the table of a new scorecard and, where `out` names a file, write the scorecard there.

    Args:
        cfg: composed from conf/score_checkpoint.yaml.

    Returns:
        tau of the headline.

    Raises:
        UserError: no drafter in `cfg.checkpoint`, or nothing to score it on.
    """
    quiet()
    check_ranges(cfg)
    chat, _, held = read_inputs(cfg)
    scorer = Scorer(cfg, build_target(cfg), chat, held, Path(cfg.answers))
    checkpoint = hub.fetch(cfg.checkpoint)
    training = earlier(checkpoint)
    card = scorer(checkpoint, training.step or 0)
    card = replace(card, checkpoint=replace(card.checkpoint, train_seconds=training.seconds))
    if cfg.out:
        write_json(Path(cfg.out), card.to_json())
    print(settings_table(card))
    return card.headline.tau

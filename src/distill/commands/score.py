"""foredraft score: score a checkpoint folder again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distill.config.build import build_target, quiet, read_inputs
from distill.options import ScoreCommandOptions
from distill.report.bottleneck import bottleneck
from distill.report.compare import earlier
from distill.report.tables import settings_table
from distill.scoring.scorer import Scorer
from distill.utils.atomic_files import write_json
from drafters.checkpoint import io as hub


def score(options: ScoreCommandOptions) -> float:
    """Print a new scorecard; write it to `out`, if set.

    Raises:
        UserError: no drafter in `checkpoint`, or no prompts.
    """
    quiet()
    chat, _, held = read_inputs(options.target, options.prompts, options.score)
    scorer = Scorer(
        options.score,
        options.decode,
        build_target(options.target),
        chat,
        held,
        Path(options.answers),
        seed=options.seed,
        target_name=options.target.name,
        control=options.control,
        full_audit=options.audit == "full",
    )
    checkpoint = hub.fetch(options.checkpoint)
    training = earlier(checkpoint)
    card = scorer(checkpoint, training.step or 0)
    card = replace(card, checkpoint=replace(card.checkpoint, train_seconds=training.seconds))
    if options.out:
        write_json(Path(options.out), card.to_json())
    print(settings_table(card))
    if line := bottleneck(card):
        print(line)
    return card.compared.tau

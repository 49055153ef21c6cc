"""foredraft passport: what was measured of a checkpoint, on one page and as JSON."""

from __future__ import annotations

from pathlib import Path

from decode.errors import UserError
from distill.commands.score import scored
from distill.options.commands import PassportOptions
from distill.scoring.compare import scorecard
from distill.serving import engine_scores
from distill.utils.atomic_files import write_json
from distill.utils.progress import say
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint import passport as pages
from drafters.checkpoint.folder import read_config, target_origin
from drafters.hub.untrusted_files import in_hub_cache


def passport(options: PassportOptions) -> float:
    """Write the passport of a checkpoint; returns its tau.

    Raises:
        UserError: no drafter, or no scorecard (with `again=true` one is made); a checkpoint of the Hub's
            cache without `folder`.
    """
    checkpoint = checkpoint_io.fetch(options.checkpoint)
    if options.folder is None and in_hub_cache(checkpoint):
        raise UserError(
            f"{options.checkpoint}: give folder=<a folder> for the passport of a drafter of the Hub"
        )
    again = options.again or options.score.engine != engine_scores.NONE
    card = scored(options, checkpoint) if again else scorecard(checkpoint)
    config = read_config(checkpoint)
    where = options.checkpoint if in_hub_cache(checkpoint) else ""
    folder = checkpoint if options.folder is None else Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    page, values = pages.write(checkpoint, card, config["drafter"], target_origin(checkpoint), where, folder)
    if options.out:
        write_json(Path(options.out), card.to_json())
    say(f"passport: {page}, {values}")
    return card.headline.tau

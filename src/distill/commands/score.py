"""foredraft score: score a checkpoint folder again."""

from __future__ import annotations

from pathlib import Path

from decode.evaluation.scorecard import Scorecard
from distill.config.build import PromptReader, TargetSource, quiet
from distill.options.commands import ScoreCommandOptions
from distill.prompts.templates import clock
from distill.report.bottleneck import bottleneck
from distill.scoring.compare import earlier
from distill.scoring.scorer import Scorer
from distill.scoring.tables import headline, settings_table
from distill.serving import engine_scores
from distill.utils.atomic_files import write_json
from distill.utils.progress import say
from drafters.checkpoint import io as checkpoint_io


def score(options: ScoreCommandOptions) -> float:
    """Print a new scorecard; write it to `out`, if set.

    Raises:
        UserError: `checkpoint` has no drafter, or there are no prompts.
    """
    card = scored(options, checkpoint_io.fetch(options.checkpoint))
    print(f"headline: {headline(card)}\n{settings_table(card)}")
    if options.out:
        write_json(Path(options.out), card.to_json())
        print(f"scorecard: {options.out}")
    else:
        print("the scorecard is not kept; out=score.json writes it to a file")
    if line := bottleneck(card):
        print(line)
    return card.headline.tau


def scored(options: ScoreCommandOptions, checkpoint: Path) -> Scorecard:
    """Score a checkpoint's folder again.

    Raises:
        UserError: there is no drafter, or there are no prompts.
    """
    quiet()
    engine_scores.check(options.score, training=False)
    moment = clock.moment_of_checkpoint(checkpoint)
    chat, _, held = PromptReader(options.target, options.prompts, options.score).read(moment)
    _say_fewer(options, len(held))
    target = TargetSource(options.target).load(decodes=False, chat=chat)
    score, served_plan, folder = options.score, "", Path(options.answers).parent / "engine"
    if score.engine != engine_scores.NONE:
        drafter = checkpoint_io.load(checkpoint, target)
        score, served_plan = engine_scores.as_served(score, None, drafter, target)
    scorer = Scorer(
        score,
        options.decode,
        target,
        chat,
        held,
        Path(options.answers),
        seed=options.seed,
        target_name=options.target.name,
        control=options.control,
        full_audit=options.audit == "full",
        served_plan=served_plan,
        engine=engine_scores.scorer(score, chat, held, options.seed, folder, training=False),
    )
    training = earlier(checkpoint)
    return scorer(checkpoint, training.step or 0).after(training)


def _say_fewer(options: ScoreCommandOptions, held: int) -> None:
    """Print which numbers of prompts are more than the held-out ones."""
    asked = {"prompts": options.score.prompts, "replay_prompts": options.score.replay_prompts}
    more = [f"score.{name}={count}" for name, count in asked.items() if count > held]
    if more:
        say(
            f"{', '.join(more)}: there are {held} held-out prompts, and all of them are scored; "
            "prompts.heldout=<file> gives more"
        )

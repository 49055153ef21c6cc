"""From a composed configuration to a trained, scored drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler
from distill import export as exporting
from distill.config.build import build_drafter, build_target, quiet, read_inputs
from distill.config.validate import check_ranges, refused
from distill.data.datamodule import Keep, RolloutData
from distill.data.on_policy import OnPolicy
from distill.data.taps_memory import TapMemory
from distill.distributed.graceful_shutdown import Stop
from distill.loggers.base import begin, trackers
from distill.loggers.loggers import ending
from distill.losses.objective import Objective
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.report import html as html_report
from distill.report import terminal as summary
from distill.rollouts.produce import produce
from distill.scoring.scorer import Scorer
from distill.training.checkpointing import STATE, ScoreCheckpoint, TrainingBar
from distill.training.memory import MemoryWatch, Sizes, explain_out_of_memory
from distill.training.module import DistillModule
from distill.training.strategies import check_strategy, join_others
from distill.training.throughput import Throughput
from distill.training.time_budget import Budget
from distill.training.trainer import build_optimizer, build_trainer, fit
from distill.utils.progress import say, switch
from distill.utils.run_folder import checkpoints
from drafters.base import Drafter
from drafters.checkpoint import io as hub
from drafters.registry import short_name


@dataclass(frozen=True)
class Shared:
    """What runs of one process have in common, so that none of them makes it anew.

    Attributes:
        target: loaded.
        held: what it says of rows; see `Keep`.
    """

    target: Target
    held: dict[tuple, TapMemory] = field(default_factory=dict)


@ending()
def train(cfg: DictConfig, folder: Path, budget: Budget | None = None, shared: Shared | None = None) -> float:
    """Rollouts, training, scores.

    Args:
        cfg: of one drafter.
        folder: see `run`.
        budget: ends training; None: trainer.max_steps does.
        shared: with other runs of this process; None: nothing is.

    Returns:
        See `run`, as for what is raised.
    """
    quiet()
    switch["on"] = cfg.trainer.enable_progress_bar
    check_ranges(cfg)
    chat, prompts, held = read_inputs(cfg, folder)
    L.seed_everything(cfg.seed, verbose=False)
    state = next((c / STATE for c in reversed(checkpoints(folder)) if (c / STATE).exists()), None)
    trainer = build_trainer(cfg, folder, state, callbacks=[TrainingBar()])
    join_others(trainer, cfg.target.placement)
    target = shared.target if shared else build_target(cfg, trainer.strategy.root_device)
    # All that can be wrong with the configuration shows here, before hours of work.
    with refused():
        drafter = build_drafter(cfg, target)
        exporting.check(cfg.export.to or exporting.NATIVE, cfg.export.push_to, short_name(drafter))
        if cfg.gradient_checkpointing:
            drafter.checkpoint_gradients()
        objective = Objective(instantiate(cfg.objective), instantiate(cfg.weights), cfg.logits_rows)
        objective.check(drafter)
        on_policy = _on_policy(cfg, target, drafter)
        optimizer = build_optimizer(cfg, trainer)
        check_strategy(trainer, drafter, on_policy is not None)
        scorer = _scorer(cfg, target, chat, held, drafter) if cfg.score.enabled else None
    saver = ScoreCheckpoint(folder, cfg.score.every, scorer, cfg.target.path, stop := Stop(), budget)
    memory = _watch(trainer, cfg, saver, budget)
    begin(trainer.loggers)
    counted = _begin(cfg, drafter, target)
    name = f"drafter={short_name(drafter)}"
    if not (drafter.trains or drafter.needs_fit):
        say(f"{name}: nothing is trained; checkpoints/0 is the drafter as it is")
        _keep(trainer, saver, drafter, target)
        return _finish(trainer, cfg, folder, target)
    stores = cache(partial(produce, cfg, target, chat, prompts, drafter, folder))
    store = stores(0)
    target.tap(drafter.taps)
    # What was counted for another run, a draft vocabulary say, is kept with its weights.
    if drafter.needs_fit and not counted:
        say(f"{name}: {drafter.fit(store.texts())}")
    if not drafter.trains:
        _keep(trainer, saver, drafter, target)
        return _finish(trainer, cfg, folder, target)

    if scorer:
        scorer.prepare()
        target.rest()
    keep = Keep(target, cfg.taps, cfg.taps_gb, cfg.packing, shared.held if shared else None)
    data = RolloutData(
        stores, cfg.rollout.refresh_every, keep, cfg.batch_size, _longest(cfg, target), cfg.seed
    )
    begun = int(state.parents[1].name) if state else 0
    data.open(begun, trainer)
    rates = cfg.optimizer.warmup, cfg.optimizer.final_lr
    module = DistillModule(target, drafter, objective, optimizer, *rates, on_policy, stop, budget)
    if begun:
        say(f"resuming from step {begun}")
    sizes = Sizes(cfg.batch_size, cfg.drafter.get("depth") or 1, cfg.gradient_checkpointing)
    with explain_out_of_memory(trainer, memory, module, sizes):
        fit(trainer, module, data, state, stop)
    return _finish(trainer, cfg, folder, target)


def _watch(trainer: L.Trainer, cfg: DictConfig, saver: ScoreCheckpoint, budget: Budget | None) -> MemoryWatch:
    """Give the trainer what looks on, in the order in which it has to: the budget before what saves."""
    meter = Throughput(memory := MemoryWatch(cfg.try_largest))
    watching = [memory, meter, *([budget] if budget else []), saver, meter.resume]
    trainer.callbacks += watching  # pyright: ignore[reportAttributeAccessIssue]
    if budget:
        found = checkpoints(saver.root.parent)
        budget.resume(trainer, int(found[-1].name) if found else 0)
    return memory


def _scorer(cfg: DictConfig, target: Target, chat: Chat, held: list[Prompt], drafter: Drafter) -> Scorer:
    """What scores checkpoints, by plans that the drafter can follow."""
    scorer = Scorer(cfg, target, chat, held, Path(cfg.output_dir) / "heldout")
    for candidate in scorer.candidates:
        drafter.check(candidate)
    return scorer


def _longest(cfg: DictConfig, target: Target) -> int:
    """Tokens of a training row."""
    return min(cfg.max_tokens, target.max_positions or cfg.max_tokens)


def _on_policy(cfg: DictConfig, target: Target, drafter: Drafter) -> OnPolicy | None:
    """Answers of the drafter's own, under the law that the rollouts have; None where none are wanted."""
    rollout = cfg.rollout
    sampler = Sampler(rollout.temperature, rollout.top_k, rollout.top_p)
    stop = stop_tokens(target) if rollout.until == "answer" else []
    options = (sampler, rollout.max_new_tokens, _longest(cfg, target), stop)
    made = OnPolicy(cfg.on_policy.share, cfg.on_policy.cut, *options)
    if not made.share:
        return None
    drafter.as_target(target)  # refuses what cannot be
    return made


def _keep(trainer: L.Trainer, saver: ScoreCheckpoint, drafter: Drafter, target: Target) -> None:
    """Save and score a drafter as it is, and end the loggers, as the end of a fit would."""
    saver.save_untrained(trainer, drafter, target)
    for logger in trainer.loggers:
        logger.finalize("success")


def _begin(cfg: DictConfig, drafter: Drafter, target: Target) -> bool:
    """Take over what `drafter.init_from` has; whether that includes all that would be counted."""
    source = cfg.drafter.init_from
    if not source:
        return False
    if not drafter.trains:
        raise UserError(
            f"drafter.init_from={source}: this drafter has no weights that training could go on with"
        )
    left = hub.warm_start(drafter, hub.fetch(source), target)
    say(
        f"drafter.init_from={source}: "
        + (f"all but {', '.join(left)}" if left else "every tensor taken over")
    )
    buffers = {name for name, _ in drafter.named_buffers()}
    return not any(name.split(" ")[0] in buffers for name in left)


def _finish(trainer: L.Trainer, cfg: DictConfig, folder: Path, target: Target) -> float:
    if not trainer.is_global_zero:
        return 0.0
    summary.show(folder)
    html_report.attempt(folder)
    exporting.at_end(cfg, folder, target)
    for tracker in trackers(trainer.loggers):
        tracker.ended(folder)
    best = folder / "checkpoints" / "best" / "score.json"
    return read_scorecard(best).headline.tau if best.exists() else 0.0

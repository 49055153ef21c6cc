"""Plan a large run, from the options of `foredraft train` or from a small run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.model.causal_lm import max_positions
from distill.cli.main import rewrite
from distill.commands.planning import constants
from distill.commands.planning.before_run import BeforeRun, Work
from distill.commands.planning.command import before_any, purpose
from distill.commands.planning.estimate import Estimate
from distill.commands.planning.from_run import Job, plan_from_run
from distill.commands.planning.probe import find_card, probe_processor
from distill.commands.planning.shape import drafter_shape, empty_target, target_config, target_shape
from distill.commands.planning.sharing import named
from distill.config.compose import compose
from distill.config.plan_options import drafter_choice
from distill.config.target_size import size_settings
from distill.options.answers import answers_each
from distill.options.commands import PlanOptions
from distill.prompts.records.readers import read_file
from distill.utils.paths import CONF, bundled


def plan(options: PlanOptions, training: Sequence[str]) -> Estimate:
    """Estimate a large run.

    Args:
        options: the large run, checked.
        training: options of `foredraft train`, without a small run.

    Raises:
        UserError: no number of prompts, no such run, or a target or drafter without a known size.
    """
    if options.run is None:
        return _before(options, training)
    assert options.prompts is not None  # checked
    job = Job(
        options.prompts,
        options.samples,
        options.steps,
        options.gpus or 1,
        options.faster,
        options.network,
        options.saves,
    )
    return plan_from_run(Path(options.run), job)


def _before(options: PlanOptions, training: Sequence[str]) -> Estimate:
    cfg: Any = compose(rewrite(training, CONF), CONF)
    target = cfg.target
    config, source = target_config(str(target.path), target.revision, target.trust_remote_code)
    empty = empty_target(config, target.path)
    name = drafter_choice(training)
    drafter = drafter_shape(cfg.drafter, name, empty)
    work = _work(options, training, cfg, config)
    before = BeforeRun(target_shape(empty, str(target.path), source), drafter, work)
    chosen = before.chosen()
    return replace(
        before.estimate(),
        purpose=purpose(cfg, name, work.gpus, chosen.way),
        command=before_any(options, cfg, training, chosen),
    )


def _work(options: PlanOptions, training: Sequence[str], cfg: Any, config: Any) -> Work:
    sizes = size_settings(config.hidden_size, max_positions(config))
    rollout, trainer, prompts = cfg.rollout, cfg.trainer, _count(options, cfg.prompts)
    if not prompts + cfg.prompts.self:
        raise UserError("prompts: give their number, as in prompts=100000")
    gpus = 1 if options.gpus is None else options.gpus
    card = find_card(options.card) if gpus else probe_processor()
    card = card._replace(flops=card.flops * options.faster, bandwidth=card.bandwidth * options.faster)
    longest = rollout.max_new_tokens or sizes["rollout.max_new_tokens"]
    chosen = any(word.partition("=")[0] in ("rollout", "experiment", "rollout.engine") for word in training)
    own = not gpus or (chosen and rollout.engine == "hf")
    samples = answers_each(rollout.answers, rollout.samples, rollout.temperature, prompts)
    answers = "given" if rollout.answers == "given" else "own" if own else "vllm"
    return Work(
        prompts=prompts,
        written=cfg.prompts.self,
        samples=options.samples or samples,
        answers=answers,
        prompt_tokens=options.prompt_tokens or (constants.PROMPT_TOKENS if prompts else 1),
        answer_tokens=options.answer_tokens or longest,
        row_tokens=cfg.max_tokens or sizes["max_tokens"],
        gpus=max(1, gpus),
        card=card,
        batch=cfg.batch_size,
        accumulate=trainer.accumulate_grad_batches,
        rollout_batch=rollout.batch_size,
        steps=options.steps or trainer.max_steps,
        saves=options.saves if options.saves is not None else _saves(cfg, options),
        taps=cfg.taps,
        taps_memory=cfg.taps_gb * constants.GIB,
        disk=options.disk * constants.GIB,
        network=options.network and options.network * 1e9,
        scored=cfg.score.enabled,
        sharing=named(trainer.strategy),
        on_cpu=not gpus,
    )


def _saves(cfg: Any, options: PlanOptions) -> int | None:
    """Number of save points that the run's options name; None: as a run chooses."""
    steps, every = options.steps or cfg.trainer.max_steps, cfg.score.every
    return -(-steps // every) if steps and every else None


def _count(options: PlanOptions, prompts: Any) -> int:
    """Number of prompts, given or counted in their file.

    Raises:
        UserError: prompts of the Hub, which are not counted here; or a damaged file.
    """
    if options.prompts is not None:
        return options.prompts
    if prompts.path is None:
        if prompts.get("dataset") or prompts.get("sources"):
            raise UserError("prompts: records of the Hub are not counted here; give their number")
        return 0
    path = Path(bundled(str(prompts.path))).expanduser()
    if not path.is_file():
        raise UserError(f"prompts={prompts.path}: no such file; give one, or a number")
    count = sum(1 for _ in read_file(path, dict(prompts.columns or {}), prompts.max_bytes))
    return min(count, prompts.limit or count)

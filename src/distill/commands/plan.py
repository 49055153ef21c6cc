"""Estimate hours, disk, memory and tau of a large run, before any run or from a small one: foredraft plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.model.causal_lm import max_positions
from distill.cli.main import rewrite
from distill.commands.planning import constants
from distill.commands.planning.before_run import BeforeRun, Work
from distill.commands.planning.estimate import Estimate, as_text
from distill.commands.planning.from_run import Job, plan_from_run
from distill.commands.planning.probe import find_card, probe_processor
from distill.commands.planning.shape import drafter_shape, empty_target, target_config, target_shape
from distill.config.compose import compose
from distill.config.help import show_help
from distill.config.plan_options import plan_option_names, read_plan_options
from distill.config.target_size import size_settings
from distill.config.validate import check_ranges
from distill.options import PlanOptions, answers_each
from distill.prompts.records.readers import read_file
from distill.utils.atomic_files import put
from distill.utils.paths import CONF, bundled

RENAMED = {"processes": "gpus"}  # former flags
LEAST = {"gpus": 0, "saves": 0}  # other numbers are 1 or more
# Options that say how the run itself is done; a plan from a small run takes them from there.
BEFORE = ("card", "prompt_tokens", "answer_tokens")


def main() -> None:
    """Print the estimate."""
    show_help(CONF, "plan")
    options, training = read_arguments(sys.argv[1:])
    estimate = plan(options, training)
    print(as_text(estimate))
    if options.out:
        card = asdict(estimate) | {"hours": estimate.hours}
        put(Path(options.out), json.dumps(card, indent=1) + "\n")


def read_arguments(arguments: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Options of the plan, and those of `foredraft train`.

    Raises:
        UserError: a flag, or a value out of range.
    """
    own, training, names = [], [], plan_option_names()
    for word in _options(arguments):
        name, _, value = word.partition("=")
        counted = name != "prompts" or value.lstrip("-").isdigit()
        (own if name in names and counted else training).append(word)
    options = read_plan_options(own)
    for name in ("prompts", "gpus", "samples", "steps", "saves", "prompt_tokens", "answer_tokens"):
        if (number := getattr(options, name)) is not None and number < (least := LEAST.get(name, 1)):
            raise UserError(f"{name}={number}: give {least} or more")
    for name in ("disk", "network", "faster"):
        if (size := getattr(options, name)) is not None and size <= 0:
            raise UserError(f"{name}={size:g}: give more than 0")
    return options, training


def _options(arguments: Sequence[str]) -> list[str]:
    """The arguments as option=value; `--gpus 8` is gpus=8, and a folder is run=.

    Raises:
        UserError: another flag.
    """
    found, words = [], iter(arguments)
    for word in words:
        name, sign, value = word.removeprefix("--").partition("=")
        if word.startswith("--gpus"):
            found.append(f"gpus={value if sign else next(words, '')}")
        elif word.startswith("-"):
            name = RENAMED.get(name, name.lstrip("-"))
            raise UserError(f"{word}: write {name}={value or '...'}; options have no dashes")
        elif sign:
            found.append(word)
        else:
            found.append(f"run={word}")
    return found


def plan(options: PlanOptions, training: Sequence[str]) -> Estimate:
    """Estimate a large run.

    Args:
        options: the large run.
        training: options of `foredraft train`, without a small run.

    Raises:
        UserError: no number of prompts, no such run, or a target or drafter without a known size.
    """
    if options.run is None:
        return _before(options, training)
    given = [*training, *(f"{name}=" for name in BEFORE if getattr(options, name) is not None)]
    if given:
        raise UserError(f"{given[0]}: a plan from {options.run} takes it from that run; leave it out")
    if options.prompts is None:
        raise UserError("prompts: give the number of the large run's prompts, as in prompts=100000")
    if options.gpus == 0:
        raise UserError("gpus=0: give the number of devices like the small run's, 1 or more")
    network = options.network or constants.NETWORK / 1e9
    job = Job(
        options.prompts,
        options.samples,
        options.steps,
        options.gpus or 1,
        options.faster,
        network,
        options.saves,
    )
    return plan_from_run(Path(options.run), job)


def _before(options: PlanOptions, training: Sequence[str]) -> Estimate:
    cfg: Any = compose(rewrite(training, CONF), CONF)
    check_ranges(cfg)
    target = cfg.target
    config, source = target_config(str(target.path), target.revision, target.trust_remote_code)
    empty = empty_target(config, target.path)
    if "_target_" not in cfg.drafter:
        raise UserError("drafter=auto: its budget is drafter.minutes; name a drafter to plan for it")
    name = cfg.drafter._target_.split(".")[-3]  # package.module.Class.for_target
    drafter = drafter_shape(cfg.drafter, name, empty)
    work = _work(options, training, cfg, config)
    return BeforeRun(target_shape(empty, str(target.path), source), drafter, work).estimate()


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

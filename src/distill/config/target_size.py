"""Defaults that depend on the target or the machine, for settings that are null (docs/training.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from decode.kernels.half_products import training_dtype
from decode.model.causal_lm import max_positions
from decode.model.load import load_config
from distill.config.resolvers import device_of
from distill.config.validate import processes
from distill.options.run import TrainOptions
from distill.utils.paths import bundled
from distill.utils.progress import say

# Learning rate of a drafter trained from scratch: measured at the bundled target's hidden size. The power
# reaches the 1e-4 that EAGLE-3 drafters of 8B targets (4096) are trained with (SpecForge's examples).
RATE, RATE_SIZE, RATE_POWER = 6e-3, 256, -1.5
TRAINED_RATE = 1 / 3  # factor on that rate for a drafter that is already trained (docs/follow.md)
# Largest hidden size -> tokens of an answer and of a training row
LENGTHS = {512: (192, 512), 1024: (512, 1024)}
LONGEST = (1024, 2048)
STEPS, PASSES = 800, 5  # minimum optimizer steps; passes over the prompts
SAVES, SAVE_EVERY = 20, 200  # save points of a run; minimum steps between two


def size_settings(hidden_size: int, context: int | None, goes_on: bool = False) -> dict[str, Any]:
    """Values of the settings that depend on the target's size, by name.

    Args:
        hidden_size: hidden size of the target.
        context: its maximum length in tokens; None: unlimited.
        goes_on: whether the drafter starts from trained weights.
    """
    rate = RATE * (max(hidden_size, RATE_SIZE) / RATE_SIZE) ** RATE_POWER * (TRAINED_RATE if goes_on else 1)
    answer, row = next((tokens for size, tokens in LENGTHS.items() if hidden_size <= size), LONGEST)
    if context:
        answer, row = min(answer, context // 2), min(row, context)
    return {
        "optimizer.optimizer.lr": float(f"{rate:.2g}"),
        "rollout.max_new_tokens": answer,
        "max_tokens": row,
    }


def fill_size_settings(cfg: DictConfig, announce: bool = True) -> dict[str, str]:
    """Set size-dependent settings that are null, and print them in one line.

    Args:
        cfg: composed configuration; modified in place.
        announce: print the settings.

    Returns:
        Names of the settings, and what decided them.

    Raises:
        UserError: see `load_config`.
    """
    names = [name for name in size_settings(1, None) if _is_null(cfg, name)]
    if not names:
        return {}
    target = cfg.target
    config = load_config(str(bundled(target.path)), target.revision, target.trust_remote_code)
    config = config.get_text_config()
    goes_on = bool(OmegaConf.select(cfg, "drafter.init_from"))
    values = size_settings(config.hidden_size, max_positions(config), goes_on)
    for name in names:
        OmegaConf.update(cfg, name, values[name])
    what = f"a target of hidden size {config.hidden_size}" + (" and a trained drafter" if goes_on else "")
    if announce:
        _announce(what, {name: values[name] for name in names})
    return dict.fromkeys(names, what)


def fill_precision(cfg: DictConfig, announce: bool = True) -> dict[str, str]:
    """Set `trainer.precision` if it is null; prints a choice of fp32 on CPUs that are slow in bf16.

    Returns:
        The setting's name, and what decided it.
    """
    if not _is_null(cfg, "trainer.precision"):
        return {}
    device = torch.device(device_of(cfg.trainer.accelerator))
    slow = training_dtype(device) == torch.float32
    cfg.trainer.precision = "32-true" if slow else "bf16-mixed"
    what = "a CPU that is slow in bf16" if slow else f"the device, {device.type}"
    if slow and announce:
        _announce(what, {"trainer.precision": cfg.trainer.precision})
    return {"trainer.precision": what}


def _is_null(cfg: DictConfig, name: str) -> bool:
    group, _, key = name.rpartition(".")
    part = OmegaConf.select(cfg, group) if group else cfg
    return OmegaConf.is_dict(part) and key in part and part[key] is None


def _announce(what: str, values: Mapping[str, Any]) -> None:
    say(f"for {what}: {' '.join(f'{name}={value}' for name, value in values.items())}")


def training_steps(prompts: int, samples: int, written: int, rows: int) -> int:
    """Number of optimizer steps of `rows` rows that train on each prompt PASSES times; see `with_length`."""
    return max(STEPS, ceil((prompts * max(PASSES, samples) + written) / rows))


def steps_between_saves(steps: int) -> int:
    """Number of optimizer steps between two save points of a run."""
    return max(SAVE_EVERY, ceil(steps / SAVES))


def with_length(options: TrainOptions, prompts: int) -> TrainOptions:
    """Fill in the numbers of steps and of steps between save points, from the number of answers.

    Each prompt is trained on five times: by several answers or by passes over one answer, since a new answer
    teaches more than another pass. Each answer and each self-written row is used at least once.

    Args:
        options: options of the run; set values of `trainer.max_steps` and `score.every` are kept.
        prompts: number of prompts, without self-written ones.
    """
    samples, written = options.rollout.answers_each(prompts), options.prompts.self
    answers = prompts * samples + written
    trainer, score = options.trainer, options.score
    world = processes(trainer.accelerator, trainer.devices, trainer.num_nodes)
    rows = options.batch_size * trainer.accumulate_grad_batches * world  # per optimizer step
    steps = trainer.max_steps or training_steps(prompts, samples, written, rows)
    every = score.every or steps_between_saves(steps)
    chosen = {"trainer.max_steps": steps} if trainer.max_steps is None else {}
    chosen |= {"score.every": every} if score.every is None else {}
    what = f"{answers:,} answers, {rows} in a step"
    if chosen:
        _announce(what, chosen)
    config = options.config.choose(what, {"trainer.max_steps": steps, "score.every": every})
    config = config.choose(f"{prompts:,} prompts", {"rollout.samples": samples})
    return replace(
        options,
        trainer=replace(trainer, max_steps=steps, build=partial(trainer.build, max_steps=steps)),
        score=replace(score, every=every),
        config=config,
    )

"""Inputs of benchmarks, and the conditions recorded in their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from decode.hardware import hardware
from decode.model.target import Target
from distill.config.build import build_target, read_inputs
from distill.config.read import read_part
from distill.options import HeldOutInputs, ScoringOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.utils.provenance import commit


@dataclass(frozen=True, kw_only=True)
class Inputs(HeldOutInputs):
    """Target, prompts and scoring options of conf/benchmark_*.yaml."""

    score: ScoringOptions


def load_inputs(cfg: DictConfig) -> tuple[Target, Chat, list[Prompt], list[Prompt]]:
    """Target, chat template, training prompts and held-out prompts (see `read_inputs`)."""
    options = read_part(Inputs, cfg)
    chat, train, held = read_inputs(options.target, options.prompts, options.score)
    return build_target(options.target), chat, train, held


def conditions(cfg: DictConfig, target: Target, threads: int, load: Sequence[float]) -> dict[str, Any]:
    """Settings and machine of a benchmark, for its result file."""
    return {
        "temperature": cfg.temperature,
        "max_new_tokens": cfg.score.max_new_tokens,
        "repeats": cfg.score.repeats,
        "target": cfg.target.path,
        "checkpoint": cfg.checkpoint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": threads,
        "hardware": hardware(target.device),
        "load_average": load,
        "seed": cfg.seed,
        "commit": commit(),
    }

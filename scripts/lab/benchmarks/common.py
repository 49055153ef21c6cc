"""What benchmarks share: inputs, the conditions recorded in their results, and their last line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from decode.hardware import hardware
from decode.model.target import Target
from distill.config.build import PromptReader, TargetSource, quiet
from distill.config.read import read_part
from distill.config.validate import check_out, check_ranges
from distill.options.commands import HeldOutInputs
from distill.options.run import ScoringOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.scoring.scorer import threads
from distill.scoring.target_drift import only_untuned
from distill.utils.provenance import commit
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io


@dataclass(frozen=True, kw_only=True)
class Inputs(HeldOutInputs):
    """Target, prompts and scoring options of conf/lab/*.yaml."""

    score: ScoringOptions


def load_inputs(cfg: DictConfig) -> tuple[Target, Chat, list[Prompt], list[Prompt]]:
    """Target, chat template, training prompts and held-out prompts (see `PromptReader.read`).

    Raises:
        UserError: a setting is out of range, or one of them cannot be read.
    """
    quiet()
    check_ranges(cfg)
    check_out(cfg)
    options = read_part(Inputs, cfg)
    chat, train, held = PromptReader(options.target, options.prompts, options.score).read()
    return TargetSource(options.target).load(chat=chat), chat, train, held


def load_drafter(checkpoint: str, target: Target) -> Drafter:
    """The drafter of a folder or hub id.

    Raises:
        UserError: there is none, or it has a tuned target.
    """
    drafter = checkpoint_io.load(checkpoint_io.fetch(checkpoint), target)
    only_untuned(drafter, "checkpoint")
    return drafter


def encode(chat: Chat, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts."""
    return [chat.encode(p.messages, p.tools) for p in prompts]


@contextmanager
def loads() -> Iterator[list[float]]:
    """Context that yields the load average at its start; the one at its end is added."""
    load = [os.getloadavg()[0]]
    yield load
    load.append(os.getloadavg()[0])


@contextmanager
def conditions(cfg: DictConfig, target: Target) -> Iterator[dict[str, Any]]:
    """Context of a measurement on `score.threads` CPU threads.

    Yields its settings and machine, for the result file; the second load average comes at its end.
    """
    with loads() as load, threads(cfg.score.threads):
        yield {
            "temperature": cfg.temperature,
            "max_new_tokens": cfg.score.max_new_tokens,
            "repeats": cfg.score.repeats,
            "target": cfg.target.path,
            "checkpoint": cfg.checkpoint,
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "hardware": hardware(target.device),
            "load_average": load,
            "seed": cfg.seed,
            "commit": commit(),
        }


def machine(card: Mapping[str, Any]) -> str:
    """Hardware, threads and load of a result, for a terminal."""
    return f"{card['hardware']}, {card['threads']} threads, load {span(card['load_average'], 2)}"


def span(ends: Sequence[float], digits: int) -> str:
    """`1.2..3.4`."""
    return "..".join(f"{end:.{digits}f}" for end in ends)

"""The engine that options name, ready to be timed with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.model.load import source_of
from decode.model.target import Target
from decode.planning.round_timing import clock_of
from decode.sampling import Sampler
from distill.engine_costs.in_transformers import TransformersRounds
from distill.engine_costs.in_vllm import Serving, VLLMRounds
from distill.engine_costs.measure import TimedEngine
from distill.engines.vllm import VLLM
from distill.options.commands import AdviseEngineOptions
from distill.prompts.chat_template import Chat
from distill.serving.engine_scores import SPARE, format_for
from drafters.base import Drafter
from drafters.checkpoint.io import as_saved
from drafters.export import formats
from drafters.export.layout import trained_depth
from drafters.registry import short_name

ENGINES = ("vllm", "transformers")
OPTION = "engine_python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An engine, and the draft lengths that the drafter has there."""

    engine: TimedEngine
    lengths: tuple[int, ...]


def check(options: AdviseEngineOptions) -> None:
    """Check the options before a target is loaded.

    Raises:
        UserError: an unknown engine, contradictory options, or no interpreter with the engine.
    """
    if options.engine not in ENGINES:
        raise UserError(f"engine={options.engine}: choose {' or '.join(ENGINES)}")
    if (options.checkpoint is None) == (options.drafter is None):
        raise UserError(
            "advise engine=: give checkpoint=<folder or hub id>, or drafter=<kind> to time random weights"
        )
    counts = ("lengths", "passes", "batch_sizes")
    for name in [name for name in counts if min(getattr(options, name), default=0) < 1]:
        raise UserError(f"{name}: give numbers of 1 or more")
    if options.engine == "transformers":
        for name in [name for name in (OPTION, "engine_args") if getattr(options, name)]:
            raise UserError(f"{name}: transformers runs in this process; leave it out")
        if max(options.batch_sizes) > 1:
            raise UserError("batch_sizes: transformers drafts for one request at a time; give [1]")
    elif not options.engine_python:
        raise UserError(
            f"engine={options.engine}: give {OPTION}=/path/to/bin/python of an environment that has it"
        )
    else:
        VLLM(options.engine_python, option=OPTION)


def prepare(
    options: AdviseEngineOptions,
    drafter: Drafter,
    target: Target,
    chat: Chat,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    logs: Path,
    exported: Path,
) -> Prepared:
    """Export the drafter for the engine.

    Args:
        options: of the command.
        drafter: trained, or with random weights.
        target: of the drafter.
        chat: tokenizer of the prompts.
        sampler: distribution of the answers.
        prompts: token ids.
        logs: folder of the server's output.
        exported: an empty folder for the exported drafter, which must outlive the engine.

    Raises:
        UserError: the engine cannot draft with it.
    """
    kind, settings = short_name(drafter), drafter.settings
    if drafter.traits.tunes_target:
        raise UserError(f"drafter={kind}: tunes its target, so plain decoding of the target is no baseline")
    to = "hf" if options.engine == "transformers" else format_for(drafter, target)
    formats.check(kind, settings, target, to)
    layout = formats.write_layout(as_saved(drafter), target, to)
    layout.write(exported)
    filters = {"temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p}
    source = source_of(str(target.model.name_or_path))
    if options.engine == "transformers":
        clock = clock_of(target)
        engine: TimedEngine = TransformersRounds(
            source, exported, {}, target.dtype, target.device, filters, clock
        )
        return Prepared(engine=engine, lengths=tuple(sorted(set(options.lengths))))
    lengths = _lengths(options.lengths, kind, settings, to)
    room = max(map(len, prompts)) + options.score.max_new_tokens + max(*lengths, SPARE)
    serving = Serving(
        installation=VLLM(str(options.engine_python), options.engine_args, options.engine_patience, OPTION),
        command=layout.command(str(source[0]), str(exported)),
        dtype=str(target.dtype).removeprefix("torch."),
        context=min(room, target.max_positions or room),
        batch=max(options.batch_sizes),
        on_cpu=target.device.type == "cpu",
        folder=logs,
        chat=chat,
        sampler=filters,
        threads=options.score.threads,
    )
    return Prepared(engine=VLLMRounds(serving), lengths=lengths)


def _lengths(asked: Sequence[int], kind: str, settings: Any, to: str) -> tuple[int, ...]:
    """Draft lengths to time: those that are asked for, or the one length of heads and blocks."""
    found = formats.FORMATS[to][kind]
    if found.length is trained_depth:
        return (trained_depth(settings),)
    return tuple(sorted(set(asked)))

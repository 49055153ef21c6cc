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
from distill.engine_costs import in_llama_cpp, in_vllm
from distill.engine_costs.in_foredraft import ForedraftRounds
from distill.engine_costs.in_transformers import TransformersRounds
from distill.engine_costs.measure import TimedEngine
from distill.engines.llama_cpp import LlamaCpp
from distill.engines.vllm import VLLM
from distill.options.commands import AdviseEngineOptions
from distill.prompts.chat_template import Chat
from distill.serving.engine_scores import SPARE, format_for
from drafters.base import Drafter
from drafters.checkpoint.io import as_saved
from drafters.export import formats
from drafters.export.layout import trained_depth
from drafters.export.llama_cpp import file as gguf_file
from drafters.registry import short_name

LLAMA_CPP, TRANSFORMERS, OURS = "llama.cpp", "transformers", "foredraft"
# name -> installation; None: runs in this process
ENGINES = {"vllm": VLLM, LLAMA_CPP: LlamaCpp, TRANSFORMERS: None, OURS: None}
OPTION = "engine_python"
ROUNDS = 4  # least number of whole rounds in an answer


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
        raise UserError(f"engine={options.engine}: choose one of {', '.join(ENGINES)}")
    if (options.checkpoint is None) == (options.drafter is None):
        raise UserError(
            "advise engine=: give checkpoint=<folder or hub id>, or drafter=<kind> to time random weights"
        )
    counts = ("lengths", "passes", "batch_sizes")
    for name in [name for name in counts if min(getattr(options, name), default=0) < 1]:
        raise UserError(f"{name}: give numbers of 1 or more")
    least = ROUNDS * (max(options.lengths) + 1)
    if options.score.max_new_tokens < least:
        raise UserError(
            f"score.max_new_tokens={options.score.max_new_tokens}: too few to time rounds of "
            f"{max(options.lengths)} drafted tokens; give {least} or more, or shorter lengths"
        )
    _check_engine(options)


def _check_engine(options: AdviseEngineOptions) -> None:
    """Check the options that some engines have and others lack."""
    if options.engine != LLAMA_CPP:
        for name in [name for name in ("target_gguf", "outtype") if getattr(options, name)]:
            raise UserError(f"{name}: is of engine=llama.cpp; leave it out")
    gguf_file.check_kind(options.outtype)
    if not (installation := ENGINES[options.engine]):
        for name in [name for name in (OPTION, "engine_args") if getattr(options, name)]:
            raise UserError(f"{name}: {options.engine} runs in this process; leave it out")
        if options.engine == TRANSFORMERS and max(options.batch_sizes) > 1:
            raise UserError("batch_sizes: transformers drafts for one request at a time; give [1]")
    elif not options.engine_python:
        raise UserError(
            f"engine={options.engine}: give {OPTION}=/path/to/bin/python of an environment that has it"
        )
    else:
        installation(options.engine_python, option=OPTION)


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
    if drafter.traits.tunes_target:
        kind = short_name(drafter)
        raise UserError(f"drafter={kind}: tunes its target, so plain decoding of the target is no baseline")
    if options.engine == OURS:
        lengths = _possible(options.lengths, drafter)
        return Prepared(engine=ForedraftRounds(target, drafter, sampler), lengths=lengths)
    filters = {"temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p}
    to = format_of(options.engine, drafter, target)
    lengths = _lengths(options.lengths, drafter, to)
    longest = max(*map(len, prompts), *options.passes)
    room = longest + max(options.score.max_new_tokens + max(lengths), *options.passes) + SPARE
    shared: dict[str, Any] = {
        "context": min(room, target.max_positions or room),
        "batch": max(options.batch_sizes),
        "folder": logs,
        "sampler": filters,
        "threads": options.score.threads,
    }
    layout = formats.write_layout(as_saved(drafter), target, to)
    source = source_of(str(target.model.name_or_path))
    if options.engine == LLAMA_CPP:
        file = gguf_file.target_file(options.target_gguf, target)
        gguf_file.write_on(layout, file, options.outtype).write(exported)
        command = layout.command(str(file), str(exported))
        installed = LlamaCpp(str(options.engine_python), options.engine_args, options.engine_patience, OPTION)
        llama = in_llama_cpp.Serving(installation=installed, target=file, command=command, **shared)
        return Prepared(engine=in_llama_cpp.LlamaCppRounds(llama), lengths=lengths)
    layout.write(exported)
    if options.engine == TRANSFORMERS:
        where = target.dtype, target.device
        kind, _ = formats.exported_part(short_name(drafter), drafter.settings)
        rounds = TransformersRounds(source, exported, kind, *where, filters, clock_of(target))
        return Prepared(engine=rounds, lengths=lengths)
    vllm = in_vllm.Serving(
        installation=VLLM(str(options.engine_python), options.engine_args, options.engine_patience, OPTION),
        command=layout.command(str(source[0]), str(exported)),
        dtype=str(target.dtype).removeprefix("torch."),
        on_cpu=target.device.type == "cpu",
        chat=chat,
        **shared,
    )
    return Prepared(engine=in_vllm.VLLMRounds(vllm), lengths=lengths)


def format_of(engine: str, drafter: Drafter, target: Target) -> str:
    """Format in which an engine loads a drafter.

    Raises:
        UserError: there is none; see `formats.check`.
    """
    if engine == "vllm":
        return format_for(drafter, target)
    to = formats.GGUF if engine == LLAMA_CPP else engine
    formats.check(short_name(drafter), drafter.settings, target, to)
    return to


def _possible(asked: Sequence[int], drafter: Drafter) -> tuple[int, ...]:
    """Draft lengths to time in our decoder: those asked for that the drafter can draft, or its longest."""
    deepest = drafter.max_depth or max(asked)
    return tuple(sorted({min(length, deepest) for length in asked}))


def _lengths(asked: Sequence[int], drafter: Drafter, to: str) -> tuple[int, ...]:
    """Draft lengths to time: those that are asked for, or the one length of heads and blocks there."""
    kind, settings = formats.exported_part(short_name(drafter), drafter.settings)
    if (to, kind) == (TRANSFORMERS, "mtp"):
        return (1,)
    if formats.FORMATS[to][kind].length is trained_depth:
        return (trained_depth(settings),)
    return tuple(sorted(set(asked)))

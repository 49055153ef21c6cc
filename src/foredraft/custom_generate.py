"""Decoding with a drafter inside transformers: `custom_generate=foredraft.assist(drafter)` of `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Output, Round
from decode.model.load import load_tokenizer, target_of
from decode.model.target import Target
from decode.plan import Plan
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.folder import read_config
from foredraft.arguments import check_fit
from foredraft.hf_arguments import (
    Prompts,
    check_call,
    check_config,
    padded,
    read_ends,
    read_prompts,
)
from foredraft.hf_processors import processing
from foredraft.plans import fastest_plan, given_plan


def assist(
    drafter: Drafter | str | PathLike[str],
    plan: Plan | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Assisted:
    """Decode with a drafter in transformers' `generate`, without changing the distribution of its texts.

    `model.generate(**inputs, custom_generate=foredraft.assist(drafter))` has the texts of `generate` at
    temperature 0, up to the rounding of its passes, and its distribution otherwise; draws differ.
    docs/notebook.md lists the arguments that are supported and refused.

    Args:
        drafter: from `load_drafter`, or a checkpoint's folder or hub id, loaded for the model that calls.
        plan: what is drafted in a round: a Plan, or a name as in "chain"; default: the
            fastest of the drafter's score on this machine (plain decoding, if that is), else a dynamic tree.
        tokenizer: of `stop_strings`; default: the one next to the model's files.

    Raises:
        UserError: no drafter there, or a plan that it does not support.
    """
    given: Any = drafter
    if not isinstance(given, Drafter | str | PathLike):
        raise UserError(f"assist: give a drafter or its checkpoint, not {type(given).__name__}")
    if not isinstance(given, Drafter):
        given = checkpoint_io.fetch(str(given))
        read_config(given)
    chosen = None if plan is None else given_plan(plan, given if isinstance(given, Drafter) else None)
    if chosen and chosen.lossy:
        raise UserError(f"assist: plan {chosen.name} changes the text; give a lossless plan")
    return Assisted(given, chosen, tokenizer)


class Assisted:
    """What `assist` returns; `generate` calls it with the arguments that it has prepared.

    Attributes:
        outputs: of the last call, one for each row; see `decode.generation.types.Output`.
    """

    def __init__(
        self, drafter: Drafter | Path, plan: Plan | None, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._drafter, self._plan, self._tokenizer = drafter, plan, tokenizer
        self._loaded: tuple[PreTrainedModel, Target, Drafter, tuple[torch.device, torch.dtype]] | None = None
        self.outputs: list[Output] = []

    @property
    def tau(self) -> float:
        """Tokens for each verification round in the last call, the model's own included; 0 without rounds."""
        rounds = [emitted for output in self.outputs for emitted in output.emitted]
        return sum(rounds) / len(rounds) if rounds else 0.0

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Decode a batch.

        `generate` finds `stop_strings` among the parameters and hands it over; without that it would look
        for a tokenizer, which it has dropped.

        Raises:
            UserError: an argument that is not supported, or a drafter of another model.
        """
        call = {"streamer": streamer, "synced_gpus": synced_gpus} | _arguments(inspect.currentframe())
        check_call(call)
        check_config(generation_config)
        prompts = read_prompts(input_ids, model_kwargs)
        if stop_strings is not None:
            criterion = StopStringCriteria(self._tokenizer or _tokenizer(model), stop_strings)
            stopping_criteria = StoppingCriteriaList([*stopping_criteria, criterion])
        ends = read_ends(stopping_criteria, prompts, model)
        draws = bool(generation_config.do_sample)
        done = processing(logits_processor, draws, prompts.padding, input_ids.device)
        # private API: transformers has no public name for the padding token that it has chosen.
        chosen = generation_config._pad_token_tensor
        pad = None if chosen is None else int(chosen)
        streamed = call["streamer"] and _Streamed(call["streamer"], len(prompts.texts), pad)
        with _ready(model):
            target, drafter = self._load(model)
            with target.lock:  # another thread would set other taps
                target.tap(drafter.taps)
                plan = self._plan or fastest_plan(drafter, target, done.sampler, len(prompts.texts))
                self.outputs = generate(
                    target,
                    drafter,
                    prompts.texts,
                    max_new_tokens=ends.max_new_tokens,
                    sampler=done.sampler,
                    plan=plan,
                    # so that torch.manual_seed seeds it, as it does in `generate`
                    seed=int(torch.randint(2**62, ())) if draws else 0,
                    stop=ends.stop,
                    until=ends.until(prompts),
                    on_round=streamed or None,
                    edit=done.edit,
                ).outputs
        if streamed:
            streamed.end()
        return _result(prompts, [output.tokens for output in self.outputs], pad, generation_config)

    def _load(self, model: PreTrainedModel) -> tuple[Target, Drafter]:
        """The model as a target, and its drafter; both are kept for the next call."""
        known = self._loaded
        where = model.device, model.dtype
        if known is None or known[0] is not model or known[3] != where:
            target, drafter = target_of(model), self._drafter
            if isinstance(drafter, Path):
                drafter = checkpoint_io.load(drafter, target)
                if self._plan:
                    drafter.check(self._plan)
            check_fit(drafter, target)
            known = self._loaded = model, target, drafter, where
        _, target, drafter, _ = known
        if drafter.traits.tunes_target:
            raise UserError(
                f"assist: a {type(drafter).__name__} drafter tunes its target, so the text would differ; "
                "decode with foredraft.generate"
            )
        return target, drafter


def _arguments(frame: FrameType | None) -> dict[str, Any]:
    """Arguments of the `generate` that calls, of those that transformers 5 hands to no callable.

    Without its streamer, text would appear nowhere, and a reader of TextIteratorStreamer would wait for ever.
    """
    caller = frame and frame.f_back
    if caller is None or caller.f_code is not inspect.unwrap(vars(GenerationMixin)["generate"]).__code__:
        return {}
    names = ("streamer", "synced_gpus", "assistant_model")
    return {name: value for name in names if (value := caller.f_locals.get(name)) is not None}


def _tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer next to a model's files."""
    try:
        return load_tokenizer(model.name_or_path or "")
    except UserError:
        raise UserError(
            "generate: stop_strings: foredraft.assist(drafter, tokenizer=tokenizer) reads them"
        ) from None


@contextmanager
def _ready(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; weights of a model that is not in training are frozen, so that copies may be read."""
    training = [module for module in model.modules() if module.training]
    trained = [] if training else [weight for weight in model.parameters() if weight.requires_grad]
    model.eval()
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for weight in trained:
            weight.requires_grad_(True)


class _Streamed:
    """Hands tokens to a streamer as `generate` does: of all rows, one position at a time.

    Args:
        streamer: of transformers.
        rows: number of rows.
        pad: token of rows that have ended.
    """

    def __init__(self, streamer: Any, rows: int, pad: int | None) -> None:
        self._streamer, self._pad, self._sent = streamer, pad or 0, 0
        self._rows: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, done: Round) -> None:
        for row, tokens in zip(done.requests, done.emitted, strict=True):
            self._rows[row] += tokens
        self._put(min(len(self._rows[row]) for row in done.requests))  # others have ended

    def _put(self, end: int) -> None:
        for place in range(self._sent, end):
            column = [row[place] if place < len(row) else self._pad for row in self._rows]
            self._streamer.put(torch.tensor(column))
        self._sent = max(self._sent, end)

    def end(self) -> None:
        """Hand over the rest, and end the streamer."""
        self._put(max(map(len, self._rows)))
        self._streamer.end()


def _result(
    prompts: Prompts, tokens: Sequence[Sequence[int]], pad: int | None, config: GenerationConfig
) -> GenerateDecoderOnlyOutput | Tensor:
    sequences = torch.cat([prompts.ids, padded(tokens, pad, prompts.ids)], 1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences)  # pyright: ignore[reportArgumentType]

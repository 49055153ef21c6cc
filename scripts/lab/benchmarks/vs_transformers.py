"""Compare decoding speed with Hugging Face's `generate` on one target, interleaved in one process."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from decode.generation.generate import generate
from decode.generation.types import Proposer
from decode.model.own_cache import cache_name
from decode.model.target import Tap, Target
from decode.plan import Plan
from decode.sampling import Sampler
from foredraft.custom_generate import Assisted

WARM_UP = 8  # tokens that each contender decodes before timing


class Text(NamedTuple):
    """Output of one call."""

    tokens: list[int]  # new tokens
    emitted: list[int]  # new tokens of each target pass after the prefill
    accepted: int | None = None  # drafted tokens that were kept, where only their number is known


@dataclass(frozen=True, slots=True)
class Contender:
    """A decoder.

    Attributes:
        name: of its row.
        decode: (prompt, max_new_tokens) -> text, in one call.
        clock: its own clock, in s, where another process decodes; None: that of the race.
        prepare: called before each repeat, untimed, in place of a warm-up before all of them.
        alike: its greedy texts should be those of the first contender.
    """

    name: str
    decode: Callable[[Sequence[int], int], Text]
    clock: Callable[[], float] | None = None
    prepare: Callable[[], None] | None = None
    alike: bool = True


def ours(
    target: Target,
    drafter: Proposer | None,
    plan: Plan,
    sampler: Sampler,
    taps: Sequence[Tap] = (),
    stop: Sequence[int] = (),
    seed: int = 0,
) -> Callable[[Sequence[int], int], Text]:
    """`decode.generation.generate` at batch 1; `taps` are those of the drafter."""

    def decode(prompt: Sequence[int], length: int) -> Text:
        target.tap(taps)
        options = {
            "max_new_tokens": length,
            "sampler": sampler,
            "plan": plan,
            "seed": seed,
            "stop": stop,
        }
        output = generate(target, drafter, [prompt], **options).outputs[0]
        return Text(output.tokens, output.emitted)

    return decode


def hugging_face(
    target: Target,
    sampler: Sampler,
    assistant: PreTrainedModel | None = None,
    depth: int = 0,
    stop: Sequence[int] = (),
    static: int = 0,
    custom: Assisted | None = None,
) -> Callable[[Sequence[int], int], Text]:
    """`generate` of transformers on the module of the target.

    Args:
        target: that decodes.
        sampler: temperature, top-k, top-p and min-p.
        assistant: drafts exactly `depth` tokens per round (assisted generation).
        depth: without an assistant, the largest number of tokens copied from the context (prompt lookup);
            0: no drafts.
        stop: end tokens.
        static: tokens that a static cache holds, with which passes over one token run compiled, the way of
            gpt-fast; the first of them compile. 0: a growing cache and no compiler.
        custom: decodes in place of `generate`'s loop, as `custom_generate`.
    """
    options: dict[str, Any] = {"do_sample": sampler.temperature > 0, "repetition_penalty": 1.0}
    if options["do_sample"]:
        options |= {"temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p}
        options |= {"min_p": sampler.min_p or None}
    no_token = -1  # None would select the default of the model
    options |= {"eos_token_id": list(stop) or no_token, "pad_token_id": stop[0] if stop else 0}
    arguments: dict[str, Any] = {}
    if assistant is not None:
        arguments["assistant_model"] = assistant
        config = assistant.generation_config
        assert config is not None
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = depth, "constant"
        config.assistant_confidence_threshold = 0.0  # else drafts may end early
    elif depth:
        options["prompt_lookup_num_tokens"] = depth
    if custom is not None:
        arguments["custom_generate"] = custom
    model: Any = target.model
    cache = StaticCache(config=target.config, max_cache_len=static) if static else None
    if cache is not None:
        arguments[cache_name(type(model))] = cache
        if target.device.type == "cpu":  # where transformers does not compile by itself
            model = _with_compiled_steps(model)

    @torch.inference_mode()
    def decode(prompt: Sequence[int], length: int) -> Text:
        if target.max_positions is not None:
            length = min(length, target.max_positions - len(prompt))
        tokens = torch.tensor([list(prompt)], device=target.device)
        rounds = _Rounds()
        if cache is not None:
            cache.reset()
        with nullcontext() if cache is None else _constant_weights():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=GenerationConfig(**options, max_new_tokens=length),
                streamer=rounds,
                **arguments,
            )
        emitted = custom.outputs[0].emitted if custom else rounds.sizes[2:]  # custom streams single tokens
        return Text(out[0, len(prompt) :].tolist(), emitted)

    return decode


def _with_compiled_steps(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules and weights, with passes over one token compiled.

    Passes over prompts are not, since each length would compile again.
    """
    plain, compiled = model.forward, torch.compile(model.forward)

    @functools.wraps(plain)  # `generate` reads the names of its arguments
    def forward(input_ids: Tensor, **options: Any) -> Any:
        return (compiled if input_ids.shape[1] == 1 else plain)(input_ids=input_ids, **options)

    twin = copy.copy(model)
    twin.forward = forward
    return twin


def _constant_weights() -> AbstractContextManager[Any]:
    """Context in which the compiler takes weights for constants, and so packs them for the processor.

    Tensors of the cache become constants too: it has to be the same one in all calls.
    """
    try:
        # private API: with the public `options` of torch.compile the tracer still makes weights inputs.
        from torch._inductor import config

        return config.patch(freezing=True)
    except (AttributeError, ImportError):  # slower, and as correct
        return nullcontext()


class _Rounds(BaseStreamer):
    """Streamer that records the number of tokens per call: the prompt, then those of each target pass."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @override
    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())

    @override
    def end(self) -> None:
        pass


class Result(NamedTuple):
    """What `race` measured of one contender."""

    row: dict[str, Any]
    texts: list[list[int]]  # new tokens of each prompt


@dataclass(slots=True)
class _Tally:
    seconds: list[float] = field(default_factory=list)  # of each repeat
    counts: list[int] = field(default_factory=list)  # tokens of each repeat
    texts: list[Text] = field(default_factory=list)  # of the first repeat

    @property
    def speeds(self) -> list[float]:
        return [n / s for n, s in zip(self.counts, self.seconds, strict=True)]


def race(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    repeats: int,
    clock: Callable[[], float],
    progress: Callable[[], Any] | None = None,
) -> list[Result]:
    """Time all contenders on every prompt in turn, rotating who goes first.

    Times include the prefill, which Hugging Face's `generate` cannot exclude.

    Args:
        contenders: the first is the baseline.
        prompts: token ids.
        max_new_tokens: of each text.
        repeats: over all prompts.
        clock: seconds; CPU time leaves out what other programs take. A contender's own goes before.
        progress: called after each prompt.

    Returns:
        For each contender `name`, `tokens_per_second` (median over the repeats), its `spread`
        (slowest, fastest), `ratio` to the first contender (median over the ratios of repeats), its
        `ratio_spread`, `tau` (see `decode.evaluation.scorecard`; None if unknown) and `tokens`; and its
        texts of the first repeat.
    """
    tallies = [_Tally() for _ in contenders]
    for contender in contenders:
        if contender.prepare is None:
            contender.decode(prompts[0], min(WARM_UP, max_new_tokens))
    for repeat in range(repeats):
        for contender, tally in zip(contenders, tallies, strict=True):
            if contender.prepare is not None:
                contender.prepare()
            tally.seconds.append(0.0)
            tally.counts.append(0)
        for number, prompt in enumerate(prompts):
            for place in range(len(contenders)):
                index = (place + repeat + number) % len(contenders)
                tally, now = tallies[index], contenders[index].clock or clock
                begin = now()
                text = contenders[index].decode(prompt, max_new_tokens)
                tally.seconds[-1] += now() - begin
                tally.counts[-1] += len(text.tokens)
                if repeat == 0:
                    tally.texts.append(text)
            if progress:
                progress()
    return [
        Result(_row(contender.name, tally, tallies[0]), [text.tokens for text in tally.texts])
        for contender, tally in zip(contenders, tallies, strict=True)
    ]


def _row(name: str, tally: _Tally, first: _Tally) -> dict[str, Any]:
    speeds = tally.speeds
    ratios = [speed / baseline for speed, baseline in zip(speeds, first.speeds, strict=True)]
    return {
        "name": name,
        "tokens_per_second": statistics.median(speeds),
        "spread": [min(speeds), max(speeds)],
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "tau": _tau(tally.texts),
        "tokens": tally.counts[0],
    }


def _tau(texts: Sequence[Text]) -> float | None:
    """New tokens of a target pass after the prefill, over the texts of which it is known; None: of none."""
    passes = [n for text in texts for n in text.emitted]
    tokens, count = sum(passes), len(passes)
    for text in texts:
        if text.accepted is not None:  # the other tokens are one of each pass
            tokens += len(text.tokens) - 1
            count += len(text.tokens) - 1 - text.accepted
    return tokens / count if count else None

"""Time decoders interleaved in one process, so that machine noise affects all of them equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode.generation.types import Generation, Output, Proposer, Times
from decode.plan import Plan

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class DecodeTimings:
    """Outputs and times of one decoder at one setting.

    Attributes:
        outputs: of the first run.
        times: sum over all batches and runs.
        seconds: per batch or pair of batches, summed over runs, without prefill.
        tokens: decoded in `seconds`, i.e. all but the first of each request.
        requests: number of requests over all runs.
        passes: see `Generation`.
    """

    outputs: list[Output] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    requests: int = 0
    passes: str = ""

    @property
    def decoded(self) -> int:
        """Tokens decoded in `times.total`."""
        return sum(self.tokens)

    def add(self, generation: Generation, run: int, part: int) -> None:
        """Add a batch to a part of the prompts; in the first run parts must come in order."""
        if not run:
            self.outputs += generation.outputs
        if part == len(self.seconds):
            self.seconds.append(0.0)
            self.tokens.append(0)
        self.requests += len(generation.outputs)
        self.passes = generation.passes
        self.seconds[part] += generation.times.total
        self.tokens[part] += sum(len(o.tokens) - 1 for o in generation.outputs)
        for name in ("prefill", "draft", "verify", "total"):
            value = getattr(self.times, name) + getattr(generation.times, name)
            setattr(self.times, name, value)

    @property
    def speed(self) -> float:
        """Tokens per second, without prefill."""
        return self.decoded / self.times.total if self.times.total else 0.0

    @property
    def speed_with_prefill(self) -> float:
        """Tokens per second, with prefill."""
        return (self.decoded + self.requests) / (self.times.prefill + self.times.total)


def time_interleaved(
    decode: Callable[..., Generation],
    drafter: Proposer,
    plans: Sequence[Plan],
    prompts: Prompts,
    batch: int,
    repeats: int,
    max_new_tokens: int,
    names: Sequence[int | str],
    on_batch: Callable[[], None],
    first_in_pairs: bool = False,
) -> list[DecodeTimings]:
    """Decode all prompts with every plan, alternating between plans after each batch.

    Args:
        decode: `generate` with target, sampler and seed bound.
        drafter: for plans that draft.
        plans: plans to time.
        prompts: token ids.
        batch: prompts decoded together.
        repeats: number of runs; every run gives the same tokens.
        max_new_tokens: per prompt.
        names: identifiers of the prompts, which key the random draws.
        on_batch: called after every batch.
        first_in_pairs: of each pair of batches, the first plan decodes one: the first of the first pair, the
            second of the next, and so on; in the next run the others.
    """
    timings = [DecodeTimings() for _ in plans]
    proposers = [drafter if plan.depth else None for plan in plans]
    for plan, proposer in zip(plans, proposers, strict=True):  # warm up allocator and kernels
        decode(proposer, prompts[:batch], plan=plan, max_new_tokens=min(8, max_new_tokens))
    for run in range(repeats):
        for number, start in enumerate(range(0, len(prompts), batch)):
            part = prompts[start : start + batch]
            keys = names[start : start + batch]
            order = list(range(len(plans)))
            if (run + number) % 2:  # alternate which plan comes first
                order.reverse()
            pair, second = divmod(number, 2)
            single = start + batch >= len(prompts) and not second  # the last batch, without another
            if first_in_pairs and not single and (run + pair + second) % 2:
                order.remove(0)
            for i in order:
                out = decode(proposers[i], part, plan=plans[i], requests=keys, max_new_tokens=max_new_tokens)
                timings[i].add(out, run, pair if first_in_pairs else number)
            on_batch()
    return timings

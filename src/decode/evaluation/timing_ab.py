"""Decoders against one another, interleaved in one process, so that they share the machine's moods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode.generation.types import Generation, Output, Proposer, Times
from decode.plan import Plan

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Tally:
    """What all runs of one decoder at one setting gave. Tokens and rounds count run 0 alone.

    Attributes:
        outputs: of run 0.
        times: of all batches and runs.
        seconds: of each batch, over all runs, prefill excluded.
        tokens: behind `seconds`: all but each request's first.
        requests: over all runs.
    """

    outputs: list[Output] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    requests: int = 0

    @property
    def decoded(self) -> int:
        """Tokens behind `times.total`."""
        return sum(self.tokens)

    def add(self, generation: Generation, run: int, batch: int) -> None:
        """Count one batch; run 0 has all batches in order."""
        if not run:
            self.outputs += generation.outputs
            self.seconds.append(0.0)
            self.tokens.append(0)
        self.requests += len(generation.outputs)
        self.seconds[batch] += generation.times.total
        self.tokens[batch] += sum(len(o.tokens) - 1 for o in generation.outputs)
        for name in ("prefill", "draft", "verify", "total"):
            value = getattr(self.times, name) + getattr(generation.times, name)
            setattr(self.times, name, value)

    @property
    def speed(self) -> float:
        """Tokens a second, prefill excluded."""
        return self.decoded / self.times.total if self.times.total else 0.0

    @property
    def speed_with_prefill(self) -> float:
        """Tokens a second from the moment the prompt is there."""
        return (self.decoded + self.requests) / (self.times.prefill + self.times.total)


def compete(
    decode: Callable[..., Generation],
    drafter: Proposer,
    plans: Sequence[Plan],
    prompts: Prompts,
    batch: int,
    repeats: int,
    max_new_tokens: int,
    names: Sequence[int | str],
    advanced: Callable[[], None],
) -> list[Tally]:
    """All plans over all prompts, a batch at a time in turn.

    Args:
        decode: `generate`, given target, law and seed.
        drafter: of the plans that draft.
        plans: runners.
        prompts: the course.
        batch: prompts decoded together.
        repeats: of the whole; tokens are the same in each.
        max_new_tokens: per prompt.
        names: of the prompts; they key the draws.
        advanced: called after every batch.
    """
    tallies = [Tally() for _ in plans]
    who = [drafter if plan.depth else None for plan in plans]
    for plan, proposer in zip(plans, who, strict=True):  # warm up allocator and kernels
        decode(proposer, prompts[:batch], plan=plan, max_new_tokens=min(8, max_new_tokens))
    for run in range(repeats):
        for number, start in enumerate(range(0, len(prompts), batch)):
            part = prompts[start : start + batch]
            keys = names[start : start + batch]
            order = list(range(len(plans)))
            if (run + number) % 2:  # nobody always goes first
                order.reverse()
            for i in order:
                out = decode(who[i], part, plan=plans[i], requests=keys, max_new_tokens=max_new_tokens)
                tallies[i].add(out, run, number)
            advanced()
    return tallies

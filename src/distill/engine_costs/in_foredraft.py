"""Rounds timed in the bundled decoder, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Generation, Proposer, Traits
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.round_timing import clock_of
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from distill.engine_costs.measure import Counted
from drafters.base import Drafter

PASS_ROUNDS = 8  # verifications in a timed pass


class ForedraftRounds:
    """A `TimedEngine`: the decoder of `foredraft generate`, with chains.

    Args:
        target: the target; it gets the drafter's taps.
        drafter: the drafter, which any kind can be.
        sampler: temperature and filters.
    """

    def __init__(self, target: Target, drafter: Drafter, sampler: Sampler) -> None:
        self.name, self.target, self.drafter, self.sampler = "foredraft", target, drafter, sampler

    @contextmanager
    def plain(self) -> Iterator[ForedraftDecoder]:
        """Decode without a drafter."""
        self.target.tap(self.drafter.taps)
        yield ForedraftDecoder(self.target, None, Plan(), self.sampler)

    @contextmanager
    def drafting(self, length: int) -> Iterator[ForedraftDecoder]:
        """Decode with chains of `length` tokens."""
        plan = Plan(depth=length)  # most likely tokens, as engines draft
        self.drafter.check(plan)
        yield ForedraftDecoder(self.target, self.drafter, plan, self.sampler)


class ForedraftDecoder:
    """`generate` with one plan.

    Args:
        target: the target.
        drafter: the proposer; None: plain decoding.
        plan: shape of a draft.
        sampler: temperature and filters.
    """

    def __init__(self, target: Target, drafter: Proposer | None, plan: Plan, sampler: Sampler) -> None:
        self.target, self.drafter, self.plan, self.sampler = target, drafter, plan, sampler
        self.clock = clock_of(target)

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> Counted:
        """See `Decoder.answer`."""
        done = self._generate(prompts, tokens)
        if any(len(output.tokens) != tokens for output in done.outputs):
            raise UserError(f"score.max_new_tokens={tokens}: does not fit into the target's context")
        return Counted(
            rounds=sum(len(output.accepted) for output in done.outputs),
            tokens=sum(sum(output.accepted) + len(output.accepted) for output in done.outputs),
            drafted=sum(sum(output.drafted) for output in done.outputs),
            seconds=done.times.total * len(prompts),  # rows run side by side
            prompt_tokens=sum(map(len, prompts)),
            prompt_seconds=done.times.prefill * len(prompts),
        )

    def pass_seconds(self, prompt: Sequence[int], tokens: int) -> float:
        """See `Decoder.pass_seconds`; the verification of guesses, in the mean of some rounds."""
        guessing = ForedraftDecoder(self.target, _Guesses(), Plan(depth=tokens - 1), self.sampler)
        done = guessing._generate([prompt], PASS_ROUNDS + 1)
        return done.times.verify / len(done.outputs[0].accepted)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Generation:
        return generate(
            self.target,
            self.drafter,
            prompts,
            max_new_tokens=tokens,
            sampler=self.sampler,
            plan=self.plan,
            clock=self.clock,
        )


class _Guesses:
    """A `Proposer` that costs nothing: every token that it drafts is the vocabulary's first."""

    traits = Traits(proposals=("fixed",))

    def new_state(self, rows: int) -> list[int]:
        """The number of rows, in a list that is changed in place."""
        return [rows]

    def advance(self, *args: Any, **kwargs: Any) -> None:
        """Guesses do not depend on the text."""

    def select(self, state: list[int], rows: Sequence[int]) -> None:
        """See `Proposer.select`."""
        state[0] = len(rows)

    def append(self, state: list[int], target: Target, other: list[int]) -> None:
        """See `Proposer.append`."""
        del target
        state[0] += other[0]

    def propose(
        self, state: list[int], target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        """See `Proposer.propose`."""
        del sampler, coin
        return Draft.chain(torch.zeros(state[0], plan.depth, dtype=torch.long, device=target.device))

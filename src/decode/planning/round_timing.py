"""Rounds on the clock: all plans in turn, on one running text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise

import torch

from decode.generation.loop import Loop
from decode.generation.types import Proposer, Round
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.cost_model import PLAIN, Measured, Timed, family, spanning
from decode.rng import KeyedCoin
from decode.sampling import Sampler

REPEATS = 11  # rounds of each plan; their lower quartile counts
TRIES = 3  # texts in which a round is looked for that ends no row


def clock_of(target: Target) -> Callable[[], float]:
    """Process time where one CPU thread does all the work: others on the machine take none of it."""
    alone = target.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def measure(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    sampler: Sampler,
    batch_sizes: Sequence[int],
    *,
    max_new_tokens: int,
    seed: int = 0,
    repeats: int = REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Cost of rounds at these batch sizes, at one, and about halfway between.

    A few plans of each family are timed; all, where a drafter's drafts vary in size with the text.

    Args:
        target: decodes; its cache is begun anew.
        drafter: drafts; `target` has its taps.
        prompts: that it decodes from; the context grows from them to `max_new_tokens` more.
        plans: whose costs will be asked for.
        sampler: the law.
        batch_sizes: rows decoded together.
        max_new_tokens: of each text, or as many as two rounds of the deepest plan may settle.
        seed: of the draws.
        repeats: rounds of each plan.
        progress: called with rounds done and rounds in all.
    """
    drafting = [plan for plan in dict.fromkeys(plans) if plan.depth]
    some = spanning(drafting)
    sizes = _sizes(batch_sizes)
    found: list[Timed] = []
    for size in sizes:
        timer = _Timer(target, drafter, prompts, max(drafting, key=lambda p: p.nodes, default=PLAIN), size)
        deepest = max((plan.depth for plan in drafting), default=0)
        timer.begin(sampler, max(max_new_tokens, 2 * (deepest + 2)), seed)
        timed = [PLAIN, *some]
        each, counted = (repeats + 1) * len(timed), count(1)

        def done(size: int = size, each: int = each, counted: count[int] = counted) -> None:
            if progress:
                progress(sizes.index(size) * each + min(next(counted), each), each * len(sizes))

        own = timer.time(timed, repeats, done)
        vary = {family(one.plan) for one in own if one.slots != one.plan.nodes + 1}
        own += timer.time([p for p in drafting if p not in some and family(p) in vary], repeats, done)
        found += own
    return Measured(found)


def _sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Those asked for, 1, and one between neighbours that are far apart."""
    sizes = sorted({1, *batch_sizes})
    between = {round((a * b) ** 0.5) for a, b in pairwise(sizes) if b > 8 * a}
    return sorted({*sizes, *between})


class _Timer:
    """A text that is decoded on, each round by another plan."""

    def __init__(
        self, target: Target, drafter: Proposer, prompts: Sequence[Sequence[int]], widest: Plan, batch: int
    ) -> None:
        self.target, self.drafter, self.prompts = target, drafter, prompts
        self.widest, self.batch, self.clock = widest, batch, clock_of(target)
        self.turn = self.slots = 0

    def begin(self, sampler: Sampler, max_new_tokens: int, seed: int) -> None:
        """Of which law and how long texts are."""
        self.sampler, self.longest, self.seed = sampler, max_new_tokens, seed
        self.dice = random.Random(seed)
        self._next()

    def _next(self) -> None:
        """Other prompts, when a row of the batch has come to its end."""
        first = self.turn * self.batch
        part = [self.prompts[(first + i) % len(self.prompts)] for i in range(self.batch)]
        room = self.target.max_positions or max(map(len, part)) + self.longest
        limits = [max(min(self.longest, room - len(p)), 2) for p in part]
        coin = KeyedCoin(self.seed, [f"cost-{first + i}" for i in range(self.batch)])
        parts = self.target, self.drafter, part, limits, self.sampler, self.widest, coin, (), None
        self.loop = Loop(*parts, clock=self.clock)
        self.loop.prefill()
        self.turn += 1

    def time(self, plans: Sequence[Plan], repeats: int, done: Callable[[], None]) -> list[Timed]:
        """Rounds of every plan, in an order that changes; the first of each warms up."""
        found = []
        for repeat in range(repeats + 1):
            for plan in self.dice.sample(list(plans), len(plans)):
                one = self._round(plan)
                found += [one] if repeat else []
                done()
        return found

    def _round(self, plan: Plan, tries: int = TRIES) -> Timed:
        """One that all rows survive; where texts have room for none, one that ends some of them."""
        if len(self.loop.batch.request) < self.batch:
            self._next()
        loop = self.loop
        loop.plan, loop.on_round = plan, self._look
        before, begin = replace(loop.times), loop.now()
        loop.round()
        total = loop.now() - begin
        if tries and len(loop.batch.request) < self.batch:
            return self._round(plan, tries - 1)
        draft, verify = loop.times.draft - before.draft, loop.times.verify - before.verify
        return Timed(plan, self.batch, self.slots, draft, verify, total - draft - verify)

    def _look(self, seen: Round) -> None:
        self.slots = seen.logits.shape[1]

"""Time rounds of several plans, interleaved on one running text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise

import torch

from decode.generation.loop import Loop
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.cost_model import PLAIN, MeasuredCosts, RoundTiming, family, representative_plans
from decode.rng import KeyedCoin
from decode.sampling import Sampler

REPEATS = 11  # timed rounds per plan; the lower quartile is used
TRIES = 3  # attempts to time a round in which no row finishes


def clock_of(target: Target) -> Callable[[], float]:
    """CPU time if one CPU thread does all work, so other processes do not affect it; otherwise wall time."""
    single_thread = target.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if single_thread else time.perf_counter


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
) -> MeasuredCosts:
    """Measure the cost of rounds at these batch sizes, at 1, and at sizes between distant neighbours.

    Times representative plans of each family, or all plans if the size of its drafts varies.

    Args:
        target: target with the drafter's taps; its cache is reset.
        drafter: the drafter.
        prompts: start of the texts, which grow by up to `max_new_tokens`.
        plans: plans to estimate costs for.
        sampler: warpers of the decoder.
        batch_sizes: rows decoded together.
        max_new_tokens: per text; at least as many as two rounds of the deepest plan may settle.
        seed: of the draws.
        repeats: timed rounds per plan.
        progress: called with (rounds done, all rounds).
    """
    drafting = [plan for plan in dict.fromkeys(plans) if plan.depth]
    selected = representative_plans(drafting)
    sizes = _sizes(batch_sizes)
    timings: list[RoundTiming] = []
    for size in sizes:
        timer = _Timer(target, drafter, prompts, max(drafting, key=lambda p: p.nodes, default=PLAIN), size)
        deepest = max((plan.depth for plan in drafting), default=0)
        timer.begin(sampler, max(max_new_tokens, 2 * (deepest + 2)), seed)
        timed = [PLAIN, *selected]
        each, counted = (repeats + 1) * len(timed), count(1)

        def done(size: int = size, each: int = each, counted: count[int] = counted) -> None:
            if progress:
                progress(sizes.index(size) * each + min(next(counted), each), each * len(sizes))

        batch_timings = timer.time(timed, repeats, done)
        vary = {family(one.plan) for one in batch_timings if one.slots != one.plan.nodes + 1}
        batch_timings += timer.time(
            [p for p in drafting if p not in selected and family(p) in vary], repeats, done
        )
        timings += batch_timings
    return MeasuredCosts(timings)


def _sizes(batch_sizes: Sequence[int]) -> list[int]:
    """The given sizes, 1, and the geometric mean of neighbours more than a factor of 8 apart."""
    sizes = sorted({1, *batch_sizes})
    between = {round((a * b) ** 0.5) for a, b in pairwise(sizes) if b > 8 * a}
    return sorted({*sizes, *between})


class _Timer:
    """Decodes a text, with a different plan in each round; captured rounds have a text for each plan."""

    def __init__(
        self, target: Target, drafter: Proposer, prompts: Sequence[Sequence[int]], widest: Plan, batch: int
    ) -> None:
        self.target, self.drafter, self.prompts = target, drafter, prompts
        self.widest, self.batch, self.clock = widest, batch, clock_of(target)
        self.turn = 0

    def begin(self, sampler: Sampler, max_new_tokens: int, seed: int) -> None:
        """Set the sampler and the length of texts."""
        self.sampler, self.longest, self.seed = sampler, max_new_tokens, seed
        self.dice = random.Random(seed)
        self.loops: dict[Plan | None, Loop] = {}

    def _loop(self, plan: Plan) -> Loop:
        """A loop whose next round has this plan and all rows."""
        # A captured text is in the buffers of rounds of one plan.
        key = plan if self.target.capture else None
        loop = self.loops.get(key)
        if loop is None or len(loop.batch.request) < self.batch:
            loop = self.loops[key] = self._new_text()
            if self.target.capture:
                loop.plan = plan
                loop.round()  # captures
        loop.plan = plan
        if loop.cache is not None:
            self.target.resume(loop.cache)
        return loop

    def _new_text(self) -> Loop:
        """A loop after the prefill of the next prompts."""
        first = self.turn * self.batch
        part = [self.prompts[(first + i) % len(self.prompts)] for i in range(self.batch)]
        room = self.target.max_positions or max(map(len, part)) + self.longest
        limits = [max(min(self.longest, room - len(p)), 2) for p in part]
        coin = KeyedCoin(self.seed, [f"cost-{first + i}" for i in range(self.batch)])
        parts = self.target, self.drafter, part, limits, self.sampler, self.widest, coin, (), None
        loop = Loop(*parts, clock=self.clock)
        loop.admit()
        self.turn += 1
        return loop

    def time(self, plans: Sequence[Plan], repeats: int, done: Callable[[], None]) -> list[RoundTiming]:
        """Time rounds of every plan, in random order; the first round of each is a warm-up."""
        timings = []
        for repeat in range(repeats + 1):
            for plan in self.dice.sample(list(plans), len(plans)):
                timing = self._round(plan)
                timings += [timing] if repeat else []
                done()
        return timings

    def _round(self, plan: Plan, tries: int = TRIES) -> RoundTiming:
        """Time a round in which no row finishes; after `tries` attempts any round."""
        loop = self._loop(plan)
        before = replace(loop.times)
        loop.round()
        if tries and len(loop.batch.request) < self.batch:
            return self._round(plan, tries - 1)
        after, slots = loop.times, loop.slots
        draft, verify = after.draft - before.draft, after.verify - before.verify
        rest = after.other - before.other
        return RoundTiming(plan, self.batch, slots, draft, verify, rest, loop.passes)

"""Diagnose an engine's acceptance: replay the drafter with known export mistakes and compare.

An engine that reads an export wrongly drafts without an error. Each mistake has its own acceptance by
position, so the scored drafter is modified with each known mistake and replayed on the same answers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from decode.draft import Draft
from decode.evaluation.replay import ReplayResult, replay, why_inexact
from decode.evaluation.teacher_forced import Rollout
from decode.model.target import Tap, Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Drafter
from drafters.layers.decoder_layer import DecoderLayer, Rotary
from drafters.layers.rope import frequencies

FEW_TAPS = 3  # up to this many taps, all orders are tried; above it, the reverse
EXPLAINS = 1.5  # a mistake explains acceptance within this many times the noise
CHANCE = 1e-3  # significance level of explaining the rounds of single answers


class Seen(NamedTuple):
    """Counts of an engine.

    Attributes:
        survival: share of rounds that accept at least j tokens, j from 1.
        noise: largest difference by chance, for each of these.
        rounds: rounds of each answer; None: not counted. At temperature 0, a drafter takes the same number of
            rounds for the same text on every engine, up to rounding. This distinguishes mistakes that change
            acceptance by less than the noise.
    """

    survival: Sequence[float]
    noise: Sequence[float]
    rounds: Sequence[int] | None

    def off(self, result: ReplayResult) -> list[int]:
        """Difference of rounds to a replay, per answer."""
        assert self.rounds is not None
        return [abs(round(a) - b) for a, b in zip(result.counts.rounds, self.rounds, strict=True)]

    def chance(self, own: ReplayResult, spoilt: ReplayResult) -> float:
        """Probability that a mistake fits better than none in as many answers by chance (sign test)."""
        pairs = list(zip(self.off(own), self.off(spoilt), strict=True))
        nearer, further = sum(b < a for a, b in pairs), sum(a < b for a, b in pairs)
        return float(stats.binom.sf(nearer - 1, nearer + further, 0.5)) if nearer > further else 1.0

    def distance(self, result: ReplayResult) -> float:
        """Largest difference of acceptance, in units of the noise."""
        parts = zip(self.survival, result.survival, self.noise, strict=True)
        return max(abs(a - b) / width for a, b, width in parts)


class Mistake(NamedTuple):
    """A drafter as an engine would run it after one mistake.

    Attributes:
        what: description of the mistake.
        drafter: modified or unchanged drafter, a `Proposer`.
        taps: layer ids that are read instead of the drafter's.
        order: order of the taps.
    """

    what: str
    drafter: Any
    taps: tuple[Tap, ...]
    order: tuple[int, ...]


def likeliest(
    drafter: Drafter, target: Target, answers: Sequence[Rollout], sampler: Sampler, seen: Seen
) -> str:
    """Name the mistake that explains an engine's acceptance; "" if no known mistake does.

    Args:
        drafter: the scored drafter.
        target: target of the drafter.
        answers: the target's answers to the prompts that were sent.
        sampler: sampler of the answers.
        seen: counts of the engine.
    """
    plan = Plan(len(seen.survival))
    if not answers or why_inexact(plan, sampler, drafter):
        return ""

    def replayed(proposer: Any) -> ReplayResult:
        return replay(target, proposer, answers, [plan], sampler)[0]

    own, best, figures = replayed(drafter), Mistake("", drafter, (), ()), ()
    least = seen.distance(own) if seen.rounds is None else CHANCE
    for mistake in mistakes(drafter, target):
        with _reading(target, mistake):
            spoilt = replayed(mistake.drafter)
        distance = seen.distance(spoilt) if seen.rounds is None else seen.chance(own, spoilt)
        if distance < least:
            least, best, figures = distance, mistake, spoilt.survival
    if not best.what or (seen.rounds is None and least > EXPLAINS):
        return ""
    return f"it drafts as with {best.what} (replayed so: {'/'.join(f'{s:.2f}' for s in figures)})"


def mistakes(drafter: Drafter, target: Target) -> Iterator[Mistake]:
    """Yield known mistakes that are possible with this drafter."""
    taps = tuple(drafter.taps)
    straight = tuple(range(len(taps)))
    orders = list(permutations(straight))[1:] if len(taps) <= FEW_TAPS else [straight[::-1]]
    for order in orders:
        names = ", ".join(str(taps[i]) for i in order)
        yield Mistake(f"its taps in another order ({names} instead of {_listed(taps)})", drafter, taps, order)
    for step in (-1, 1):
        moved = tuple(tap + step if isinstance(tap, int) else tap for tap in taps)
        if moved != taps and all(not isinstance(tap, int) or 0 <= tap < len(target.layers) for tap in moved):
            yield Mistake(
                f"layer ids counted another way ({_listed(moved)} instead of {_listed(taps)})",
                drafter,
                moved,
                straight,
            )
    for what, spoilt in [*_vocabularies(drafter, target), *_positions(drafter)]:
        yield Mistake(what, spoilt, taps, straight)


def _listed(taps: Sequence[Tap]) -> str:
    return ", ".join(map(str, taps))


@contextmanager
def _reading(target: Target, mistake: Mistake) -> Iterator[None]:
    """Let the target record the taps of a mistake."""
    before, transform = target.taps, target.tap_transform

    def reordered(taps: Tensor) -> Tensor:
        """(B, n, L, D) in another order of L."""
        taps = taps if transform is None else transform(taps)
        return taps[:, :, list(mistake.order)]

    target.tap(mistake.taps)
    target.tap_transform = reordered
    try:
        yield
    finally:
        target.tap(before)
        target.tap_transform = transform


class _Misnamed:
    """A drafter with a reduced vocabulary and wrongly mapped draft ids.

    Args:
        drafter: drafter that proposes.
        ids: (V',) wrong target id of each draft id.
        size: V of the target.
    """

    def __init__(self, drafter: Drafter, ids: Tensor, size: int) -> None:
        self.drafter = drafter
        d2t: Any = drafter.d2t
        self.names = torch.zeros(size, dtype=torch.long, device=ids.device)  # (V,) right id -> wrong id
        self.names[d2t] = ids % size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *arguments: Any) -> Draft:
        """Draft, and map every token to its wrong id."""
        draft = self.drafter.propose(*arguments)
        tokens = torch.where(draft.tokens < 0, draft.tokens, self.names[draft.tokens.clamp_min(0)])
        return dataclasses.replace(draft, tokens=tokens)


def _vocabularies(drafter: Drafter, target: Target) -> Iterator[tuple[str, Any]]:
    """Yield drafters with wrong maps of a reduced draft vocabulary."""
    d2t: Tensor | None = getattr(drafter, "d2t", None)
    if d2t is None:
        return
    ids = torch.arange(len(d2t), device=d2t.device)
    yield "no d2t (draft ids are taken for the target's)", _Misnamed(drafter, ids, target.vocab_size)
    wrong = "a wrong d2t (target ids where it has target id minus draft id)"
    yield wrong, _Misnamed(drafter, ids + d2t, target.vocab_size)


def _positions(drafter: Drafter) -> Iterator[tuple[str, Drafter]]:
    """Yield drafters whose rotary positions of queries are off by one."""
    for step in (-1, 1):
        spoilt = copy.deepcopy(drafter)
        rotary = next((m for m in spoilt.modules() if isinstance(m, Rotary)), None)
        layers = [m for m in spoilt.modules() if isinstance(m, DecoderLayer) and not m.qk_norm]
        if rotary is None or not layers:
            return
        for layer in layers:
            rotate_queries(layer, rotary, step)
        yield f"rotary positions of its queries off by {step:+d} (RoPE)", spoilt


@torch.no_grad()
def rotate_queries(layer: DecoderLayer, rotary: Rotary, positions: float) -> None:
    """Rotate the weights of a layer's queries, and their biases, by some positions."""
    weight, bias = layer.qkv_proj.weight, layer.qkv_proj.bias
    speed, _ = frequencies(rotary.dim, rotary.theta, rotary.rope, weight)  # (n,)
    angle = (speed * positions)[:, None]  # (n, 1)
    whole = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    rows = whole[: layer.queries].double().unflatten(0, (layer.heads, layer.head_dim))  # (heads, dim, D)
    n = len(speed)
    first, second, rest = rows[:, :n], rows[:, n : 2 * n], rows[:, 2 * n :]  # halves of the rotated pairs
    turned = [
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
        rest,
    ]
    turned_rows = torch.cat(turned, 1).flatten(0, 1).to(weight.dtype)
    weight[: layer.queries] = turned_rows[:, : weight.shape[1]]
    if bias is not None:
        bias[: layer.queries] = turned_rows[:, -1]

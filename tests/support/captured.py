"""Captured decoding beside uncaptured decoding: what both compute in the same rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.generation import loop
from decode.generation.capture.rows import CapturedRows, WholeRows
from decode.generation.capture.verified_rows import VerifiedRows
from decode.generation.generate import generate
from decode.generation.loop import Loop
from decode.generation.types import Output
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler

VOCAB = 8  # few, so that drafts of random weights are accepted now and then
PROMPTS = [[5, 1, 2, 7, 3, 5, 1, 2], [4, 6, 2], [1, 4, 5, 6, 4, 1, 4], [1, 2], [7] * 12]
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
CHAIN, DYNAMIC, SAMPLED = Plan(3), Plan(3, 3, 7), Plan(3, proposal="sampled", rule="token")
STATIC = Plan(tree=TREE, proposal="sampled", rule="recursive")
ROUNDS, LENGTH = 8, 24


def small(tiny_target, dtype=torch.float64):
    """A target of few tokens."""
    return tiny_target(vocab=VOCAB, layers=2, hidden=16, positions=512, dtype=dtype)


def decoded(
    target, drafter, plan, temperature, capture, size=None, length=LENGTH, prompts=PROMPTS, **options
):
    """Texts, and accepted tokens and draft lengths of every round."""
    target.capture = capture
    sampler = Sampler(temperature, **options.pop("warp", {}))
    options |= {"sampler": sampler, "plan": plan, "max_new_tokens": length, "batch_size": size, "stop": (3,)}
    return told(generate(target, drafter, prompts, **options).outputs)


def told(outputs: Sequence[Output]) -> list[tuple]:
    """Texts, and accepted tokens and draft lengths of every round."""
    return [(o.tokens, o.accepted, o.draft_lengths, o.drafted) for o in outputs]


class Until:
    """Ends a text at its fourth token that 3 divides."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, token: int) -> bool:
        self.count += token % 3 == 0
        return self.count == 4


class Seen(NamedTuple):
    """What a round of the running rows computed, whether or not their texts show it."""

    tokens: Tensor  # (B, N) drafted
    q: Tensor | None  # (B, Q, V) of drawn nodes
    taps: Tensor  # (B, L, D) at the roots


Rounds = tuple[list[tuple], list[Seen]]


def rounds_of(target, drafter, plan, temperature, capture, prompts=PROMPTS, warp=None, size=2) -> Rounds:
    """The first rounds of a batch, of which a row ends and another joins."""
    target.capture, found = capture, []
    sampler, coin = Sampler(temperature, **warp or {}), KeyedCoin(1, range(len(prompts)))
    limits = [min(LENGTH, target.max_positions - len(prompt)) for prompt in prompts]
    limits[0] = 4
    with pytest.MonkeyPatch.context() as patch:
        note(patch, found.append)
        texts = Loop(target, drafter, prompts, limits, sampler, plan, coin, (), None, batch_size=size)
        for _ in itertools.islice(texts.rounds(), ROUNDS):
            pass
    return told(texts.outputs), found


def note(patch: pytest.MonkeyPatch, found: Callable[[Seen], None]) -> None:
    """Call `found` with what every round computes."""
    check, path, read, drafts = loop.checked, loop.accepted_path, CapturedRows.table, list[Draft]()

    def checked(*given: Any) -> Any:
        draft = check(*given)
        drafts.append(draft.draft)
        return draft

    def accepted_path(*given: Any) -> Any:
        tokens, taps = path(*given)
        draft = drafts[-1]
        found(Seen(draft.tokens, draft.probs and draft.probs.q, taps[:, 0]))
        return tokens, taps

    def table(rows: Any) -> Any:
        lines, places, taps = read(rows), rows.index, rows._round.verify.results[2]
        if isinstance(rows, VerifiedRows):
            draft, q = rows._draft, rows._draft.probs and rows._draft.probs.q
        else:
            assert isinstance(rows, WholeRows)
            draft, whole = rows.drafted(), rows._round.fixed.draft_of(rows._round.draft.results)
            q = whole.probs and whole.probs.q[places]
        found(Seen(draft.tokens, q, taps[places, 0]))
        return lines

    patch.setattr(loop, "checked", checked)
    patch.setattr(loop, "accepted_path", accepted_path)
    patch.setattr(CapturedRows, "table", table)


def both(*given, **options) -> tuple[Rounds, Rounds]:
    """Rounds that are not captured, and rounds that are."""
    return rounds_of(*given, False, **options), rounds_of(*given, True, **options)


def compare(uncaptured: Rounds, captured: Rounds, atol: float) -> None:
    """Compare texts, drafts, distributions of drawn tokens, and hidden states."""
    assert captured[0] == uncaptured[0]
    for one, other in zip(uncaptured[1], captured[1], strict=True):
        width = one.tokens.shape[1]  # if no row is confident, an uncaptured draft ends early
        assert one.tokens.equal(other.tokens[:, :width])
        assert (other.tokens[:, width:] == PAD).all()
        torch.testing.assert_close(other.taps, one.taps, rtol=0, atol=atol)
        assert (one.q is None) == (other.q is None)
        if one.q is not None and other.q is not None:
            torch.testing.assert_close(other.q[:, : one.q.shape[1]], one.q, rtol=0, atol=atol)


def assert_same(*given, atol=1e-9, **options) -> list[tuple]:
    """Compare captured rounds with others; returns their texts."""
    found = both(*given, **options)
    compare(*found, atol)
    return found[0][0]

"""Texts of the real decoder, token by token: where each came from, and how likely it was to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.evaluation.teacher_forced import Dictate
from decode.generation.generate import generate
from decode.generation.types import Proposer, Round
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler

ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"


class Written(NamedTuple):
    """One token of a text.

    Attributes:
        token: id.
        source: accepted from the draft; corrected: the target's own where the draft offered others;
            plain: its own where nothing was offered.
        p: the target's probability, before any warper but temperature.
        p_rank: its place among all tokens, 1 the likeliest.
        q: likewise the drafter's; None where it has no law, or does not draft this far or in this round.
        q_rank: likewise; None where q is 0, too.
    """

    token: int
    source: str
    p: float
    p_rank: int
    q: float | None
    q_rank: int | None


def samples(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    plan: Plan,
    sampler: Sampler,
    max_new_tokens: int,
    laws: bool,
    stop: Sequence[int] = (),
    seed: int = 0,
    names: Sequence[int | str] | None = None,
) -> list[list[Written]]:
    """Decode the prompts in one batch and write down every token.

    Probabilities are those at the sampler's temperature, or at 1 where that is 0.

    Args:
        target: as for `generate`.
        drafter: likewise.
        prompts: token ids.
        plan: how it drafts and verifies.
        sampler: the law of the text.
        max_new_tokens: per prompt.
        laws: the drafter has laws to draw a chain of the plan's depth from: it says what q was.
        stop: end tokens.
        seed: of all draws.
        names: of the prompts; they key the draws.
    """
    view = Sampler(sampler.temperature or 1.0)
    watched = _Watched(drafter, view, plan.depth if laws else 0)
    found: list[list[Written]] = [[] for _ in prompts]

    def observe(done: Round) -> None:
        tokens = done.result.tokens  # (B, K + 1)
        ours = _standing(_at(done.logits, done.result.slots).float() / view.temperature, tokens)
        q = watched.laws(tokens)  # (B, K', V) or None
        theirs = None if q is None else _standing(q.log(), tokens[:, : q.shape[1]])
        refused = _offered_below(done.draft, done.result.slots, done.result.accepted).tolist()
        for row, request in enumerate(done.requests):
            accepted = int(done.result.accepted[row])
            for i, token in enumerate(done.emitted[row]):
                own = CORRECTED if refused[row] else PLAIN
                mass, rank = (None, None) if theirs is None else _entry(theirs, row, i)
                found[request].append(
                    Written(
                        token,
                        ACCEPTED if i < accepted else own,
                        float(ours[0][row, i]),
                        int(ours[1][row, i]),
                        mass,
                        rank if mass else None,
                    )
                )

    generate(
        target,
        watched,
        prompts,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        plan=plan,
        seed=seed,
        requests=names,
        stop=stop,
        on_round=observe,
    )
    return found


class _Watched:
    """A drafter that is asked once more, when the text is known, how likely it held it.

    Args:
        drafter: that drafts.
        view: the law it is asked at.
        depth: levels it is asked for; 0: it has no laws.
    """

    def __init__(self, drafter: Proposer, view: Sampler, depth: int) -> None:
        self._drafter, self._view, self._depth = drafter, view, depth
        self._asked: tuple[Any, Target, Sampler, KeyedCoin, Plan] | None = None
        self.new_state, self.advance, self.select = drafter.new_state, drafter.advance, drafter.select

    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        self._asked = asked = state, target, sampler, coin, plan
        return self._drafter.propose(*asked)

    def laws(self, text: Tensor) -> Tensor | None:
        """(B, K + 1) tokens that the round emitted -> (B, K, V) what it would have drawn them from."""
        asked, self._asked = self._asked, None  # a round that drafts nothing does not ask
        if asked is None or not self._depth:
            return None
        ahead = torch.nn.functional.pad(text, (0, self._depth), value=PAD)[:, : self._depth]
        plan = Plan(self._depth, proposal="sampled")
        draft = self._drafter.propose(*asked[:2], self._view, Dictate(ahead), plan)  # pyright: ignore[reportArgumentType]
        self._drafter.propose(*asked)  # what a state remembers of a draft is the real one's again
        return draft.q


def _at(rows: Tensor, slots: Tensor) -> Tensor:
    """(B, S, V) at (B, n) -> (B, n, V)."""
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], slots]


def _standing(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, V) rows and (B, n) tokens -> (B, n) their probabilities and ranks."""
    own = logits.gather(-1, tokens.clamp_min(0)[..., None])
    mass = logits.softmax(-1).gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    return mass.cpu(), 1 + (logits > own).sum(-1).cpu()


def _entry(standing: tuple[Tensor, Tensor], row: int, place: int) -> tuple[float | None, int | None]:
    mass, rank = standing
    return (float(mass[row, place]), int(rank[row, place])) if place < mass.shape[1] else (None, None)


def _offered_below(draft: Draft, slots: Tensor, accepted: Tensor) -> Tensor:
    """(B,) whether the draft had a node below the last one that was kept."""
    end = slots.gather(1, accepted[:, None])  # (B, 1)
    return ((draft.parents == end - 1) & (draft.tokens != PAD)).any(1)

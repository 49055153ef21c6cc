"""Synthetic acceptance: drafts that are accepted at stated rates, to time targets without trained drafters.

The drafter runs as ever. Then its tokens are replaced by the target's own next tokens, known from an earlier
run, or by others. Verification is unchanged, so texts are those of plain decoding. For benchmarks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.generation.types import (
    Generation,
    Observes,
    Proposer,
    ReadsTaps,
    Traits,
    depends_on_rounds,
)
from decode.model.target import Tap, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.row_state import append_rows, select_rows
from decode.sampling import Sampler
from decode.transfer import RowInts, new_tokens

TRIES = 50  # runs until a drafted text is the text that its drafts were made of
Ids = Sequence[int]


@dataclass
class _State:
    """State of the rows.

    Attributes:
        inner: of the drafter.
        known: (B, T) answers that drafts are made of; `PAD` after their ends. None before the prefill.
        lengths: (B, T) tokens to accept in a round that begins with token t of the answer.
        position: (B,) index of the next draft token in the answer.
    """

    inner: Any
    known: Tensor | None = None
    lengths: Tensor | None = None
    position: Tensor | None = None


class SyntheticAcceptance:
    """A proposer that makes the tokens of another's drafts right or wrong, at a stated rate for each depth.

    A chain keeps its shape. The first nodes of a tree become a chain of its depth, and all others siblings
    of these, because the tree of an untrained drafter may be too shallow for the accepted tokens. So there
    are as many slots and the same kernels, and about ten small ones more.

    Args:
        drafter: proposes what is replaced.
        prompts: token ids; no two may be equal.
        answers: the target's answer to each.
        rates: probability to accept depth 1, 2, ... if all before were accepted.
        vocab_size: of the target.
        seed: of what is accepted, which also depends on prompt and place, and on nothing else.

    Raises:
        UserError: rates that are no probabilities, or a drafter that keeps rejected tokens, too.
    """

    def __init__(
        self,
        drafter: Proposer,
        prompts: Sequence[Ids],
        answers: Sequence[Ids],
        rates: Sequence[float],
        vocab_size: int,
        seed: int,
    ) -> None:
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise UserError(f"acceptance={list(rates)}: give a probability for each depth, from 0 to 1")
        settles = isinstance(drafter, Observes) or drafter.traits.drafts_in_verification
        if settles or depends_on_rounds(drafter, Plan(len(rates))):
            raise UserError(
                f"acceptance: {type(drafter).__name__} keeps more of a draft than its accepted tokens, so "
                "they cannot be replaced; choose another drafter"
            )
        self.drafter, self.rates, self.vocab_size = drafter, tuple(rates), vocab_size
        self.answers = [list(answer) for answer in answers]
        # A proposal that is drawn would not be a draw from q any more.
        self.traits: Traits = replace(drafter.traits, proposals=("auto", "fixed"))
        self._rows = {tuple(prompt): row for row, prompt in enumerate(prompts)}
        if len(self._rows) < len(prompts):
            raise UserError("acceptance: two prompts are equal; give different ones")
        longest = max(map(len, answers))
        self._known = torch.full((len(answers), longest), PAD)
        for row, answer in enumerate(answers):
            self._known[row, : len(answer)] = torch.tensor(answer)
        dice = torch.Generator().manual_seed(seed)
        drawn = torch.rand(len(answers), longest, len(rates), generator=dice, dtype=torch.float64)
        hits = drawn < torch.tensor(self.rates, dtype=torch.float64)
        self._lengths = hits.long().cumprod(-1).sum(-1)
        self._trees: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @property
    def taps(self) -> Sequence[Tap]:
        """Of the drafter."""
        return self.drafter.taps if isinstance(self.drafter, ReadsTaps) else ()

    def check(self, plan: Plan) -> None:
        """Refuse plans with drafts that cannot be replaced, or with another rule than match.

        Raises:
            UserError: see above.
        """
        if plan.depth > len(self.rates):
            raise UserError(
                f"acceptance={list(self.rates)}: {len(self.rates)} rates for a draft of depth {plan.depth}; "
                "give one for each depth"
            )
        drawn = plan.proposal not in self.traits.proposals
        if drawn or plan.drafts > 1 or plan.rule.name != "match" or plan.min_confidence or plan.adapt:
            raise UserError(
                f"acceptance: drafts of {plan.name} cannot be replaced by the target's tokens; it is for "
                "fixed drafts of one length, verified by match"
            )

    def new_state(self, rows: int) -> _State:
        """See `Proposer.new_state`."""
        return _State(self.drafter.new_state(rows))

    def advance(
        self, state: _State, target: Target, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor
    ) -> None:
        """See `Proposer.advance`; the prompt tells which answer a row has."""
        if state.position is None:
            texts = new_tokens(tokens, counts, root, first=True)
            rows = torch.tensor([self._rows[tuple(text[:-1])] for text in texts])
            state.known = self._known[rows].to(target.device)
            state.lengths = self._lengths[rows].to(target.device)
            state.position = torch.ones(len(rows), dtype=torch.long, device=target.device)
        else:
            state.position = state.position + RowInts.of(counts).on(target.device)
        self.drafter.advance(state.inner, target, tokens, taps, counts, root)

    def select(self, state: _State, rows: Sequence[int]) -> None:
        """See `Proposer.select`."""
        kept = RowInts.of(rows)
        self.drafter.select(state.inner, kept)
        state.known, state.lengths = select_rows(state.known, kept), select_rows(state.lengths, kept)
        state.position = select_rows(state.position, kept)

    def append(self, state: _State, target: Target, other: _State) -> None:
        """See `Proposer.append`."""
        self.drafter.append(state.inner, target, other.inner)
        state.known = append_rows(state.known, other.known)
        state.lengths = append_rows(state.lengths, other.lengths)
        state.position = append_rows(state.position, other.position)

    def propose(self, state: _State, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """The drafter's draft with other tokens."""
        self.check(plan)
        draft = self.drafter.propose(state.inner, target, sampler, coin, plan)
        if not draft.depth:
            return draft
        assert state.known is not None
        assert state.lengths is not None
        assert state.position is not None
        rows, nodes = draft.tokens.shape
        levels, parents, step, ancestors = self._tree(min(draft.depth, nodes), nodes, draft)
        last = state.known.shape[1] - 1
        places = (state.position[:, None] + levels - 1).clamp_max(last)  # (B, N)
        right = state.known.gather(1, places).clamp_min(0)  # the target's token at each node's place
        accepted = state.lengths.gather(1, state.position[:, None].clamp_max(last))  # (B, 1)
        # Another token for each node, so that siblings differ and none is accepted.
        tokens = torch.where(step <= accepted, right, (right + step) % self.vocab_size)
        if draft.is_chain:
            return replace(draft, tokens=tokens)
        tree = {"parents": parents.expand(rows, -1), "depth": min(draft.depth, nodes), "score": None}
        shared = None if draft.ancestor_mask is None else ancestors
        return replace(draft, tokens=tokens, ancestor_mask=shared, **tree)

    def _tree(self, depth: int, nodes: int, draft: Draft) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N,) levels, parents and numbers of nodes from 1, and the (1, S, S) ancestors.

        The number of a node on the chain is its level. All others have higher ones, so none is accepted.
        """
        if (depth, nodes) not in self._trees:
            if nodes + len(self.rates) >= self.vocab_size:
                raise UserError(
                    f"acceptance: {nodes} nodes need more tokens than {self.vocab_size}; draft fewer"
                )
            number = torch.arange(nodes)
            levels = torch.where(number < depth, number, (number - depth) % depth) + 1
            # A node on the chain hangs below the one before it, as do its siblings.
            tree = Draft(number[None], (levels - 2)[None], depth)
            values = levels, levels - 2, self._numbers(depth, nodes), tree.ancestors()
            device = draft.tokens.device
            moved = [value.to(device) for value in values]
            self._trees[depth, nodes] = moved[0], moved[1], moved[2], moved[3]
        return self._trees[depth, nodes]

    def _numbers(self, depth: int, nodes: int) -> Tensor:
        """Levels of the chain's nodes, and numbers above every rate's depth for the others."""
        number = torch.arange(1, nodes + 1)
        return torch.where(number <= depth, number, number + len(self.rates))


def replayed(
    decode: Callable[..., Generation],
    target: Target,
    drafter: Proposer,
    plan: Plan,
    prompts: Sequence[Ids],
    rates: Sequence[float],
    seed: int,
) -> tuple[SyntheticAcceptance, int]:
    """A proposer that drafts the texts which decoding with it gives.

    Passes over several tokens round differently from passes over one, so a drafted text can leave the plain
    one where two logits are almost equal. Then the drafted text replaces it and is decoded again.

    Args:
        decode: `generate` with prompts, target, sampler, seed and limits bound.
        target: of the drafter.
        drafter: see `SyntheticAcceptance`, as are the following.
        plan: of the drafts that are replaced.
        prompts: token ids.
        rates: of acceptance.
        seed: of what is accepted.

    Returns:
        The proposer, and the number of answers that differ from plain decoding's.

    Raises:
        UserError: see `SyntheticAcceptance`; or the texts do not repeat.
    """
    plain = [output.tokens for output in decode(None, plan=Plan()).outputs]
    answers = plain
    for _ in range(TRIES):
        proposer = SyntheticAcceptance(drafter, prompts, answers, rates, target.vocab_size, seed)
        proposer.check(plan)
        found = [output.tokens for output in decode(proposer, plan=plan).outputs]
        if found == answers:
            return proposer, sum(a != b for a, b in zip(plain, found, strict=True))
        answers = found
    raise UserError(
        f"acceptance: after {TRIES} runs the drafted texts still differ from the known ones; this device "
        "does not decode the same text twice"
    )

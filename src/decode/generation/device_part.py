"""What a round computes on the device; `Loop` and captured rounds run the same functions.

Nothing here reads the device, and no shape depends on the number of accepted tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.draft_check import draft_fault
from decode.generation.types import Proposer
from decode.model.target import Target, TargetOutput
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.verification.result import VerificationResult
from decode.verification.target_probs import TextState


class Texts(Protocol):
    """State of the running texts on the device, except the target's cache and the drafter's state."""

    root: Tensor  # (B,) last emitted tokens, not yet read by the target
    seen: Tensor | None  # (B, V) tokens of each text, for the repetition penalty
    followed: TextState | None  # state that the rule keeps for each text


class CheckedDraft(NamedTuple):
    """A draft with ids that the target can embed, and its faults before that."""

    draft: Draft
    fault: Tensor  # (B,) see `draft_fault`


class Pass(NamedTuple):
    """The target's pass over the root and the nodes of a draft: S slots."""

    forward: TargetOutput
    logits: Tensor  # (B, S, V)


def proposed(
    drafter: Proposer | None,
    state: Any,
    target: Target,
    sampler: Sampler,
    coin: KeyedCoin,
    plan: Plan,
    rows: int,
) -> Draft:
    """The drafter's draft for `rows` rows; empty without a drafter or depth."""
    if drafter is None or plan.depth == 0:  # depth may change between rounds
        return Draft.empty(rows, target.device)
    return drafter.propose(state, target, sampler, coin, plan)


def checked(draft: Draft, target: Target, plan: Plan) -> CheckedDraft:
    """Check a draft."""
    fault = draft_fault(draft, target.vocab_size, plan.rule.reads_probs)
    # An id out of range would fail in the embedding, before the fault is read.
    return CheckedDraft(replace(draft, tokens=draft.tokens.clamp(PAD, target.vocab_size - 1)), fault)


def target_pass(target: Target, root: Tensor, draft: Draft) -> Pass:
    """Run the target on the (B,) roots and the draft."""
    forward = target.extend(root[:, None], draft)
    return Pass(forward, target.head(forward.last))


def result_table(
    draft: Draft, result: VerificationResult, broken: Tensor, fault: Tensor, answers: Tensor | None = None
) -> Tensor:
    """All that the host reads of a round, in one table, so that it waits for the device once.

    Args:
        draft: the round's draft.
        result: its verification.
        broken: (B,) see `broken_slot`.
        fault: (B,) see `draft_fault`.
        answers: (B, S) the target's most likely token at every slot, or None.

    Returns:
        Rows of [accepted, *K + 1 tokens, broken slot, fault, draft length, nodes, *answers].
    """
    numbers = broken, fault, draft.lengths(), (draft.tokens >= 0).sum(-1)
    columns = [result.accepted[:, None], result.tokens, *(number[:, None] for number in numbers)]
    return torch.cat(columns if answers is None else [*columns, answers], 1)


def accepted_path(
    root: Tensor, draft: Draft, result: VerificationResult, forward: TargetOutput
) -> tuple[Tensor, Tensor]:
    """(B, K + 1) the root and the accepted tokens, and their (B, K + 1, L, D) taps; then undefined ones.

    Emitted token i was drawn at slots[i], so slots[0 .. accepted] are the root and the accepted path.
    """
    path = result.slots
    tokens = torch.cat([root[:, None], draft.tokens], 1).gather(1, path)
    row = torch.arange(path.shape[0], device=path.device)[:, None]
    return tokens, forward.taps[row, path]


def follow(texts: Texts, result: VerificationResult) -> None:
    """Add a round's tokens to the texts."""
    texts.root = result.tokens.gather(1, result.accepted[:, None])[:, 0]
    if texts.seen is not None:
        tokens = torch.where(result.tokens >= 0, result.tokens, texts.root[:, None])
        texts.seen.scatter_(1, tokens, value=True)
    if texts.followed is not None:
        texts.followed = texts.followed.after(result.tokens)

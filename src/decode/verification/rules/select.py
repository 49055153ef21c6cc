"""`select`: match the best of several drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.rng import Coin
from decode.verification.descent import match
from decode.verification.result import VerificationResult
from decode.verification.rule import Rule
from decode.verification.shape import Shape
from decode.verification.target_probs import TargetProbs


class Select(Rule):
    """Self-selection (SpecDiff-2, arXiv:2511.00606): `match` on the best of several drafts.

    The choice depends on the drawn tokens, so the nodes count as fixed and q is dropped.
    """

    name = "select"
    accepts = "any chain or tree"
    reads_probs = False
    keeps_text = True

    @override
    def check(self, plan: Shape) -> None:
        if plan.drafts == 1:
            raise UserError(
                "decode.rule=select keeps the best of several drafts: set decode.drafts=2 or more "
                "(decode=drafts), or rule=match"
            )

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        best = best_path(draft, target.all(draft))
        chosen = replace(draft, tokens=draft.tokens.masked_fill(~best, PAD), probs=None)
        return match(chosen, target, coin)


def best_path(draft: Draft, p: Tensor) -> Tensor:
    """(B, N) bool: nodes of the path with the most tokens accepted by `match` in expectation.

    The expectation is the sum over j of p(x_1) .. p(x_j) along the path; ties go to the first path.

    Args:
        draft: a tree.
        p: (B, S, V) the target's distributions.
    """
    row = torch.arange(p.shape[0], device=p.device)
    token_prob = p[row[:, None], draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)
    on_path = draft.ancestors()[:, 1:, 1:]  # (B, N, N)
    token_prob = token_prob.masked_fill(draft.tokens == PAD, 0.0)[:, None].expand_as(on_path)
    path_prob = token_prob.masked_fill(~on_path, 1.0).prod(-1, keepdim=True)  # (B, N, 1)
    expected = (on_path.to(path_prob.dtype) @ path_prob)[..., 0]  # (B, N) sum over a node's ancestors
    return on_path[row, expected.argmax(-1)]

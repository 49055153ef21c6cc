"""What the rules for sampled chains refuse."""

from __future__ import annotations

from decode.draft import Draft
from decode.errors import UserError
from decode.verification.shape import Shape

ACCEPTS = "a chain sampled from distributions q that the draft carries"


def is_sampled_chain(draft: Draft) -> bool:
    """Whether a draft is a chain that carries its q."""
    return draft.is_chain and draft.probs is not None


def check_sampled_chain(name: str, plan: Shape) -> None:
    """Compare a rule for sampled chains with the drafts of a plan.

    Raises:
        UserError: they are others.
    """
    if plan.has_siblings or plan.proposal != "sampled":
        raise UserError(
            f"decode.rule={name} verifies a chain drawn from distributions q: a fixed token has no "
            "q, and min(1, p/q) would not be lossless. Set width=1 proposal=sampled, or rule=match"
        )

"""What limits the speedup of a draft: its cost, that of verifying it, or how much of it is accepted."""

from __future__ import annotations

from decode.evaluation.scorecard import Row, Scorecard
from distill.scoring.paired import speedup

LOW_TAU = 1.8  # tokens a round; below, no round is cheap enough for much of a speedup
TRY = {
    "acceptance": "train longer (trainer.max_steps), on more prompts, or another drafter=",
    "drafting": "a shorter draft (decode.depth), fewer tokens to choose from (drafter.draft_vocab_size), or "
    "a drafter without a pass for each token (drafter=medusa, lyanna, p_eagle)",
    "verifying": "fewer nodes (decode.nodes), a GPU, or a deeper target: its passes cost less for each token",
}


def bottleneck(card: Scorecard) -> str:
    """One line: what a round of the fastest draft costs and gives, what limits it, and what to try.

    Where plain decoding is faster, it says so first.
    """
    row = card.fastest
    if not (row.nodes and row.speedup and row.tau):
        return ""
    cost = row.tau / row.speedup  # of a round, in passes of plain decoding
    drafting, verifying = (row.draft_share or 0.0) * cost, (row.verify_share or 0.0) * cost
    rest = cost - drafting - verifying
    limit = _limit(row, drafting, verifying)
    free = {
        "drafting": f"; if drafting cost nothing: {row.tau / (verifying + rest):.2f}x",
        "verifying": f"; if verifying cost one pass: {row.tau / (1 + drafting + rest):.2f}x",
    }
    return (
        f"{verdict(card)}: a round writes {row.tau:.2f} tokens for the time of {cost:.2f} "
        f"plain ones (verifying {verifying:.2f}, drafting {drafting:.2f}, the rest {rest:.2f}); its limit "
        f"is {limit}{free.get(limit, '')}; try {TRY[limit]}"
    )


def verdict(card: Scorecard) -> str:
    """The fastest draft and its speedup, or that plain decoding is faster than all of them."""
    row = card.fastest
    if card.pays:
        return f"{row.speedup:.2f}x by {row.decode}"
    return (
        "do not draft: none is faster than plain decoding on this machine; the fastest, "
        f"{row.decode}, is {speedup(row).text('{:.2f}x')}"
    )


def _limit(row: Row, drafting: float, verifying: float) -> str:
    if row.tau < LOW_TAU:
        return "acceptance"
    return "drafting" if drafting >= verifying - 1 else "verifying"

"""What limits the speedup of a draft: its cost, that of verifying it, or how much of it is accepted."""

from __future__ import annotations

from decode.evaluation.scorecard import Row, Scorecard

LOW_TAU = 1.8  # tokens a round; below, no round is cheap enough for much of a speedup
TRY = {
    "acceptance": "train longer (trainer.max_steps), on more prompts, or another drafter=",
    "drafting": "a shorter draft (decode.depth), fewer tokens to choose from (drafter.draft_vocab_size), or "
    "a drafter without a pass for each token (drafter=medusa, lyanna, p_eagle)",
    "verifying": "fewer nodes (decode.nodes), a GPU, or a deeper target: its passes cost less for each token",
}


def bottleneck(card: Scorecard) -> str:
    """One line: what a round of the fastest row costs and gives, what limits it, and what to try."""
    row = card.fastest
    if not row.speedup or not row.tau:
        return ""
    cost = row.tau / row.speedup  # of a round, in passes of plain decoding
    drafting, verifying = row.draft_share * cost, row.verify_share * cost
    rest = cost - drafting - verifying
    limit = _limit(row, drafting, verifying)
    free = {
        "drafting": f"; if drafting cost nothing: {row.tau / (verifying + rest):.2f}x",
        "verifying": f"; if verifying cost one pass: {row.tau / (1 + drafting + rest):.2f}x",
    }
    return (
        f"{row.speedup:.2f}x by {row.decode}: a round writes {row.tau:.2f} tokens for the time of {cost:.2f} "
        f"plain ones (verifying {verifying:.2f}, drafting {drafting:.2f}, the rest {rest:.2f}); its limit "
        f"is {limit}{free.get(limit, '')}; try {TRY[limit]}"
    )


def _limit(row: Row, drafting: float, verifying: float) -> str:
    if row.tau < LOW_TAU:
        return "acceptance"
    return "drafting" if drafting >= verifying - 1 else "verifying"

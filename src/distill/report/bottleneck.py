"""Find what limits the speedup of a draft: its cost, the cost of verifying it, or its acceptance."""

from __future__ import annotations

from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from distill.scoring.paired import speedup
from drafters.checkpoint.validate import setting_names
from drafters.registry import drafter_class, known_names

LOW_TAU = 1.8  # tokens a round; below this, acceptance is the limit
ONE_PASS = ("medusa", "lyanna", "p_eagle")  # drafters without a pass for each token


def bottleneck(card: Scorecard) -> str:
    """Describe cost and gain of a round of the fastest draft, its limit and what to try, in one line.

    If plain decoding is faster, the line starts with that.
    """
    row = card.fastest
    if not (row.nodes and row.speedup and row.tau):
        return ""
    cost = row.tau / row.speedup  # cost of a round, in passes of plain decoding
    drafting, verifying = (row.draft_share or 0.0) * cost, (row.verify_share or 0.0) * cost
    rest = cost - drafting - verifying
    limit = _limit(row, drafting, verifying)
    free = {
        "drafting": f"; if drafting cost nothing: {row.tau / (verifying + rest):.2f}x",
        "verifying": f"; if verifying cost one pass: {row.tau / (1 + drafting + rest):.2f}x",
    }
    *most, last = _advice(card, row, limit)
    advice = f"{', '.join(most)}, or {last}" if most else last
    return (
        f"{verdict(card)}: a timed round writes {row.tau:.2f} tokens (tau_decoded) in the time of {cost:.2f} "
        f"plain ones (verifying {verifying:.2f}, drafting {drafting:.2f}, the rest {rest:.2f}); its limit "
        f"is {limit}{free.get(limit, '')}; try {advice}"
    )


def verdict(card: Scorecard) -> str:
    """Name the fastest draft and its speedup, or advise not to draft if plain decoding is faster."""
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


def _advice(card: Scorecard, row: Row, limit: str) -> list[str]:
    """What to try. Only options that the scored drafter and its plan have are named."""
    kind = card.checkpoint.drafter
    if limit == "acceptance":
        trained = ["train longer (trainer.max_steps)", "more prompts"] if card.checkpoint.step else []
        return [*trained, "another drafter="]
    shorter = "a shorter draft (decode.depth)"
    if limit == "drafting":
        fewer = "fewer tokens to choose from (drafter.draft_vocab_size)"
        other = f"a drafter without a pass for each token (drafter={', '.join(ONE_PASS)})"
        return [
            shorter,
            *[fewer] * _has_setting(kind, "draft_vocab_size"),
            *[other] * (kind not in ONE_PASS),
        ]
    chain = row.nodes == len(row.survival)
    return [
        shorter if chain else "fewer nodes (decode.nodes)",
        "a GPU",
        "a deeper target: its passes cost less for each token",
    ]


def _has_setting(kind: str, name: str) -> bool:
    """Whether a kind of drafter has a setting; a kind of a package that is not installed has none."""
    return kind in known_names() and name in setting_names(drafter_class(kind))

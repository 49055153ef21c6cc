"""Acceptance rules of speculative decoding by name, batched over rows.

`match`, `recursive`, `kseq` and `traversal` are lossless: their output, continued by the target, has the
target's distribution (docs/lossless.md). `token` is `recursive` and `block` is `traversal` on a sampled
chain; `select` is `match` on the best of several drafts. All others are lossy and need `Plan.lossy`.

Every rule loops over depth and over sampled siblings only, for all rows at once, and does not
synchronise with the device. Random numbers come from a `Coin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from decode.draft import Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Coin
from decode.verification.descent import kseq, match, recursive, select
from decode.verification.lossy import lenience, relaxed, typical
from decode.verification.result import VerificationResult
from decode.verification.target_probs import TargetProbs
from decode.verification.traversal import traversal


class Rule(NamedTuple):
    """An acceptance rule and the drafts it can verify losslessly."""

    run: Callable[..., VerificationResult]
    accepts: str  # for error messages
    needs_chain: bool = False
    needs_probs: bool = False  # every node is sampled from a q that the draft carries
    reads_probs: bool = True  # weighs sampled nodes by q
    needs_independent: bool = False  # siblings are drawn with replacement
    lossy: bool = False


RULES = {
    "match": Rule(match, "any chain or tree", reads_probs=False),
    "token": Rule(recursive, "a chain sampled from distributions q that the draft carries", True, True),
    "block": Rule(traversal, "a chain sampled from distributions q that the draft carries", True, True),
    "recursive": Rule(recursive, "any chain or tree whose sampled nodes carry their q"),
    "kseq": Rule(kseq, "siblings drawn independently from the q that they carry", needs_independent=True),
    "traversal": Rule(traversal, "any chain or tree whose sampled nodes carry their q"),
    "select": Rule(select, "any chain or tree", reads_probs=False),
    "typical": Rule(typical, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "threshold": Rule(typical, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "topk": Rule(relaxed, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "bild": Rule(relaxed, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "sprint": Rule(relaxed, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "lenience": Rule(lenience, "any chain or tree whose sampled nodes carry their q, lossily", lossy=True),
}


def verify(plan: Plan, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Run the plan's rule on one round.

    Raises:
        UserError: the rule would not be lossless on this draft.
    """
    rule = RULES[plan.rule]
    drafted = draft.probs
    if not draft.depth and drafted is None:
        return match(draft, target, coin)  # nothing to verify; every rule draws from p
    dependent = drafted is not None and drafted.siblings > 1 and not drafted.replacement
    unfit = rule.needs_independent and dependent
    if unfit or (rule.needs_chain and not draft.is_chain) or (rule.needs_probs and drafted is None):
        raise UserError(
            f"decode.rule={plan.rule} verifies {rule.accepts}; this draft is not one: use rule=match"
        )
    if rule.reads_probs and drafted is not None and drafted.selected:
        raise UserError(
            f"decode.rule={plan.rule} would not be lossless: nodes of this draft were kept or dropped after "
            "looking at the drawn tokens, so they are no longer distributed as q: use rule=match"
        )
    if rule.run is traversal and drafted is not None and drafted.ranked:
        raise UserError(
            f"decode.rule={plan.rule} would not be lossless: which nodes of this draft were kept depends "
            "on tokens drawn elsewhere in it: use rule=recursive, or a static tree"
        )
    if rule.lossy:
        return rule.run(draft, target, coin, plan)
    # If all nodes are fixed, all rules give the same distribution, and `match` is keyed like plain decoding.
    return (rule.run if draft.probs is not None else match)(draft, target, coin)


def is_lossy_greedily(name: str) -> bool:
    """Whether a rule changes the text at temperature 0, too."""
    return name in RULES and RULES[name].run is relaxed

"""How far a target that was tuned with its drafter has moved from the original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.model.target import Target

ROWS = 64  # whose laws over the whole vocabulary exist at one time


@torch.inference_mode()
def moved(original: Target, tuned: Target, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Compare both laws, unwarped, at every answer token of the original's own rollouts.

    Both are read by the same code without a cache, so targets with the same weights differ by 0.

    Args:
        original: wrote the rollouts.
        tuned: of the same vocabulary.
        rollouts: held out.

    Returns:
        kl: nats a token, KL(original || tuned).
        reverse_kl: KL(tuned || original), at the same places.
        top1_agreement: share of tokens at which both find the same token likeliest.
        greedy_prefix: share of an answer before the first place where they do not, over prompts.
        prompts, tokens: what these are means of.
    """
    sums, prefixes = torch.zeros(3, dtype=torch.float64), []
    for rollout in rollouts:
        agreed = []
        for p, q in _laws(original, tuned, rollout):  # (R, V) logarithms
            same = p.argmax(-1) == q.argmax(-1)  # (R,)
            agreed += same.tolist()
            found = [(p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum(), same.sum()]
            sums += torch.stack([f.double().cpu() for f in found])
        prefixes.append([*agreed, False].index(False) / len(agreed))
    tokens = sum(len(answer) for _, answer in rollouts)
    kl, reverse, same = (sums / tokens).tolist()
    return {
        "kl": kl,
        "reverse_kl": reverse,
        "top1_agreement": same,
        "greedy_prefix": sum(prefixes) / len(prefixes),
        "prompts": len(rollouts),
        "tokens": tokens,
    }


def _laws(original: Target, tuned: Target, rollout: Rollout) -> Iterator[tuple[Tensor, Tensor]]:
    """(R, V) logarithms of both laws, for a few answer tokens at a time."""
    prompt, answer = rollout
    text = torch.tensor([prompt + answer[:-1]], device=original.device)  # (1, T)
    lasts = [target.read(text).last[0, len(prompt) - 1 :] for target in (original, tuned)]  # (A, D)
    wide = torch.promote_types(original.dtype, torch.float32)
    for start in range(0, len(answer), ROWS):
        p, q = (
            target.head(last[start : start + ROWS]).to(wide).log_softmax(-1)
            for target, last in zip((original, tuned), lasts, strict=True)
        )
        yield p, q


def describe(card: dict[str, Any]) -> str:
    """What a table says of a scorecard whose output is not the original target's; empty for others."""
    far = card.get("target_moved")
    if not far:
        return ""
    return (
        f"lossless to the {card['lossless_to']}, which is no longer the original: KL {far['kl']:.2g} nats a "
        f"token (reverse {far['reverse_kl']:.2g}), likeliest token the same at "
        f"{100 * far['top1_agreement']:.1f}%, greedily for {100 * far['greedy_prefix']:.0f}% of an answer, "
        f"{far['prompts']} held-out prompts"
    )


def only_untuned(target: Target, tuned: Target, what: str) -> None:
    """Refuse a drafter with a target of its own where it would be compared with others on the original.

    Raises:
        UserError: it has one.
    """
    if tuned is not target:
        raise UserError(
            f"{what}: this drafter decodes with a target of its own, so its text and speed are not to be "
            "compared with the original's; use foredraft score"
        )

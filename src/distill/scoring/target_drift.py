"""Distance of a target that was tuned with its drafter from the original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.evaluation.scorecard import Checkpoint, TargetDrift
from decode.model.target import Target
from drafters.base import Drafter

ROWS = 64  # tokens processed at once


@torch.inference_mode()
def target_drift(original: Target, tuned: Target, rollouts: Sequence[Rollout]) -> TargetDrift:
    """Compare both unwarped distributions at each answer token of the original's rollouts.

    Both are computed by the same code without a cache, so targets with equal weights differ by 0.

    Args:
        original: target that wrote the rollouts.
        tuned: tuned target with the same vocabulary.
        rollouts: held-out rollouts.
    """
    sums, prefixes = torch.zeros(3, dtype=torch.float64), []
    for rollout in rollouts:
        agreements: list[bool] = []
        for p, q in _log_probs(original, tuned, rollout):  # (R, V) each
            same = p.argmax(-1) == q.argmax(-1)  # (R,)
            agreements += same.tolist()
            parts = [(p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum(), same.sum()]
            sums += torch.stack([part.double().cpu() for part in parts])
        prefixes.append([*agreements, False].index(False) / len(agreements))
    tokens = sum(len(answer) for _, answer in rollouts)
    kl, reverse_kl, top1_agreement = (sums / tokens).tolist()
    return TargetDrift(
        kl=kl,
        reverse_kl=reverse_kl,
        top1_agreement=top1_agreement,
        greedy_prefix=sum(prefixes) / len(prefixes),
        prompts=len(rollouts),
        tokens=tokens,
    )


def _log_probs(original: Target, tuned: Target, rollout: Rollout) -> Iterator[tuple[Tensor, Tensor]]:
    """(R, V) log-probabilities of both targets, for a few answer tokens at a time."""
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


def describe(checkpoint: Checkpoint) -> str:
    """Describe the drift if the output differs from the original target's; empty otherwise."""
    drift = checkpoint.target_drift
    if not drift:
        return ""
    return (
        f"lossless to the {checkpoint.lossless_to}, which is no longer the original: KL {drift.kl:.2g} nats "
        f"a token (reverse {drift.reverse_kl:.2g}), likeliest token the same at "
        f"{100 * drift.top1_agreement:.1f}%, greedily for {100 * drift.greedy_prefix:.0f}% of an answer, "
        f"{drift.prompts} held-out prompts"
    )


def only_untuned(drafter: Drafter, what: str) -> None:
    """Reject a drafter with a tuned target where drafters are compared on the original.

    Raises:
        UserError: it has a tuned target.
    """
    if drafter.traits.tunes_target:
        raise UserError(
            f"{what}: this drafter decodes with a target of its own, so its text and speed are not to be "
            "compared with the original's; use foredraft score"
        )

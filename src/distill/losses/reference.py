"""Reference implementation of the training loss: eager, with full logits, one function per step.

    loss = sum over depths j and anchors t of weight(t, j) * divergence(p, q)

of one term; a mix is the sum of its terms times their factors. p is the target's distribution of token
t + j + 1 and q the draft's, both over the target's vocabulary; q is 0 at tokens that a reduced draft
vocabulary lacks (misses). `objective` computes the same value and gradients in chunks; tests compare the two.
Formulas and papers: `divergences` and `weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decode.model.head import Head
from drafters.base import DraftStep


class Rows(NamedTuple):
    """Both distributions at the M supervised anchors of one depth."""

    p: Tensor  # (M, V)
    q: Tensor  # (M, V)
    log_q: Tensor  # (M, V); 0 at misses, so that sums of p log q omit them
    draft_vocab: Tensor  # (V',) the target's ids of the draft vocabulary
    text: Tensor | None  # (M, 1) next token of the text

    @property
    def overlap(self) -> Tensor:
        """(M,) probability that the token rule accepts a token drawn from q."""
        return torch.minimum(self.p, self.q).sum(-1)

    def at_text(self, values: Tensor) -> Tensor:
        """(M, V) -> (M,) values at the text's next token."""
        assert self.text is not None, "tokens were not given"
        return values.gather(1, self.text)[:, 0]


def distributions(step: DraftStep, last: Tensor, head: Head, tokens: Tensor | None) -> Rows:
    """Both distributions of one depth; arguments as in `loss`."""
    position = step.place + step.depth  # its row predicts the next token
    p = head(last.flatten(0, 1)[position]).softmax(-1)
    log_q = step.head(step.hidden).log_softmax(-1)  # (M, V')
    draft_vocab = torch.arange(p.shape[1]) if step.head.d2t is None else step.head.d2t
    text = None if tokens is None else tokens.flatten()[position + 1][:, None]
    zeros = torch.zeros_like(p)
    return Rows(
        p,
        zeros.index_copy(1, draft_vocab, log_q.exp()),
        zeros.index_copy(1, draft_vocab, log_q),
        draft_vocab,
        text,
    )


# Divergences: `Rows` -> (M,) nats.


def kl(r: Rows) -> Tensor:
    """KL(p || q) over the draft's tokens."""
    return (r.p * (r.p.log() - r.log_q))[:, r.draft_vocab].sum(-1)


def ce(r: Rows) -> Tensor:
    """Cross-entropy to the target's most likely token."""
    return -r.log_q.gather(1, r.p.argmax(-1, keepdim=True))[:, 0]


def nll(r: Rows) -> Tensor:
    """Cross-entropy to the text's next token."""
    return -r.at_text(r.log_q)


def hit(r: Rows) -> Tensor:
    """Probability that a token drawn from q differs from the text's."""
    return 1 - r.at_text(r.q)


def topk(r: Rows, k: int) -> Tensor:
    """Cross-entropy to p on the target's k most likely tokens."""
    return -(r.p * r.log_q).gather(1, r.p.topk(k).indices).sum(-1)


def reverse_kl(r: Rows, floor: float) -> Tensor:
    """KL(q || p), with p at least `floor`."""
    return (r.q * (r.log_q - r.p.clamp_min(floor).log())).sum(-1)


def jsd(r: Rows, beta: float) -> Tensor:
    """Jensen-Shannon: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q."""
    log_m = (beta * r.p + (1 - beta) * r.q).log()
    return (beta * r.p * (r.p.log() - log_m) + (1 - beta) * r.q * (r.log_q - log_m)).sum(-1)


def tv(r: Rows) -> Tensor:
    """Total variation: 1 - overlap."""
    return (r.p - r.q).abs().sum(-1) / 2


def nll_tv(r: Rows, of_nll: float, of_tv: float) -> Tensor:
    """Weighted sum of both: DSpark's loss."""
    return of_nll * nll(r) + of_tv * tv(r)


def lk(r: Rows) -> Tensor:
    """Negative log-likelihood of acceptance."""
    return -r.overlap.log()


def lk_hybrid(r: Rows, decay: float) -> Tensor:
    """KL while alpha is small, total variation when it is large; the mixing weight is held constant."""
    w = (-decay * r.overlap.detach()).exp()
    return w * kl(r) + (1 - w) * tv(r)


# Acceptance: `Rows` -> (M,).
ACCEPTED: Mapping[str, Callable[[Rows], Tensor]] = {
    "overlap": lambda r: r.overlap,
    "token": lambda r: r.at_text(r.q),
    "greedy": lambda r: (r.q.argmax(-1) == r.p.argmax(-1)).to(r.q.dtype),
}


# Weights: acceptance of all depths of one anchor, count of each row, and index of the depth -> a number.


def constant(acceptance: Sequence[float], counts: Sequence[float], i: int) -> float:
    """Every depth has the same weight."""
    del acceptance
    return counts[i]


def decay(acceptance: Sequence[float], counts: Sequence[float], i: int, rate: float) -> float:
    """Only by depth."""
    del acceptance
    return counts[i] * rate**i


def dpace(acceptance: Sequence[float], counts: Sequence[float], i: int, smoothing: float) -> float:
    """Sum over depths j >= i of the probability to accept all up to j."""
    a = [(1 - smoothing) * alpha + smoothing for alpha in acceptance]
    return sum(counts[j] * math.prod(a[: j + 1]) for j in range(i, len(a)))


def streak(acceptance: Sequence[float], counts: Sequence[float], i: int, smoothing: float) -> float:
    """Derivative of the expected accepted length with respect to the acceptance at depth i."""
    a = [(1 - smoothing) * alpha + smoothing for alpha in acceptance]
    a[i] = 1.0
    return sum(counts[j] * math.prod(a[: j + 1]) for j in range(i, len(a)))


def first(acceptance: Sequence[float], counts: Sequence[float], i: int) -> float:
    """Only depth 1."""
    del acceptance
    return counts[i] if i == 0 else 0.0


def focal(acceptance: Sequence[float], counts: Sequence[float], i: int, gamma: float) -> float:
    """Probability that all depths before are accepted, times a power of the rejection at this one."""
    return counts[i] * math.prod(acceptance[:i]) * (1 - acceptance[i]) ** gamma


def loss(
    steps: Sequence[DraftStep],
    last: Tensor,
    head: Head,
    divergence: Callable[[Rows], Tensor],
    weight: Callable[[Sequence[float], Sequence[float], int], float],
    tokens: Tensor | None = None,
    aux_weights: Mapping[str, float] | None = None,
    acceptance: str = "overlap",
) -> Tensor:
    """The undivided sum, for autograd.

    Args:
        steps: steps of `Drafter.unroll`, depths ascending from 1, without gaps per anchor.
        last: (B, T, D) input of the target's head.
        head: head of the target.
        divergence: one of the above.
        weight: one of the above.
        tokens: (B, T) the text, if divergence or weights read it.
        aux_weights: name -> weight of auxiliary losses.
        acceptance: what weights read: `overlap`, `token` (q of the text's next token, the match rule) or
            `greedy` (whether both have the same most likely token).
    """
    rows = [distributions(step, last, head, tokens) for step in steps]
    chances: dict[int, list[float]] = {}  # anchor -> by depth
    counts: dict[int, list[float]] = {}
    for step, r in zip(steps, rows, strict=True):
        accepted = ACCEPTED[acceptance](r)
        for anchor, alpha in zip(step.anchor.tolist(), accepted.tolist(), strict=True):
            chances.setdefault(anchor, []).append(alpha)
        for anchor, count in zip(
            step.anchor.tolist(), (step.weight * torch.ones_like(accepted)).tolist(), strict=True
        ):
            counts.setdefault(anchor, []).append(count)
    total = last.new_zeros(())
    for step, r in zip(steps, rows, strict=True):
        weights = [weight(chances[a], counts[a], step.depth - 1) for a in step.anchor.tolist()]
        value = divergence(r) + sum((aux_weights or {})[name] * aux for name, aux in step.aux.items())
        total = total + (last.new_tensor(weights) * value).sum()
    return total

"""Checks of a draft that lossless verification relies on: token ids, and q of sampled nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.draft import PAD, Draft

FAULTS = (
    "",
    "a token id that is not in the target's vocabulary",
    "a q that is no distribution (NaN, negative entries, or a sum that is not 1)",
    "a sampled token that its q gives probability 0, or that has no q",
    "siblings with the same token, sampled without replacement",
)
ROUNDINGS = 64  # allowed for the check's own blockwise sum over the vocabulary, in float32 or wider
LANES = 16  # running sums of a softmax on a CPU


def draft_fault(draft: Draft, vocab_size: int, reads_probs: bool) -> Tensor:
    """(B,) index into `FAULTS` of the first fault of each row's draft, 0 if it has none.

    Never synchronises with the device. A single draft cannot show whether tokens were drawn from the stated
    q; `sampling_tests` tests that.

    Args:
        draft: draft to check.
        vocab_size: of the target.
        reads_probs: whether the rule weighs sampled nodes by q.
    """
    tokens, drafted = draft.tokens, draft.probs
    faults = [((tokens < PAD) | (tokens >= vocab_size)).any(-1)]
    if reads_probs and drafted is not None and drafted.q.shape[1]:
        real = drafted.sampled & (tokens != PAD)  # (B, N)
        owns = drafted.owner[:, None] == draft.parents[..., None] + 1  # (B, N, Q) row of q of each node
        used = (owns & real[..., None]).any(1)  # (B, Q)
        wide = torch.promote_types(drafted.q.dtype, torch.float32)
        is_one = (drafted.q.sum(-1, dtype=wide) - 1).abs() <= _rounding(drafted.q)  # False for NaN
        faults.append((used & ~(is_one & (drafted.q.amin(-1) >= 0))).any(-1))
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        token_q = drafted.q[row, owns.int().argmax(-1), tokens.clamp(0, vocab_size - 1)]  # (B, N)
        faults.append((real & ~(owns.any(-1) & (token_q > 0))).any(-1))
        if drafted.siblings > 1 and not drafted.replacement:
            pairs = real[:, :, None] & real[:, None] & (draft.parents[:, :, None] == draft.parents[:, None])
            pairs = pairs & (tokens[:, :, None] == tokens[:, None])  # (B, N, N), each node with itself too
            faults.append(pairs.sum((1, 2)) > real.sum(1))
    found = torch.stack(faults)  # (faults, B)
    return torch.where(found.any(0), found.int().argmax(0) + 1, 0)


def _rounding(q: Tensor) -> float:
    """Largest deviation of the sums of a correct (B, Q, V) q from 1 by rounding.

    Each entry is rounded once: by half of `eps` of itself, or by half of the smallest number. Its softmax
    divided by a sum of V terms, in `LANES` running sums of n = V / LANES terms each. An addition rounds by at
    most half of `eps` of the sum so far, which is half of the total on average: by n / 4 `eps` if all round
    the same way (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). A quarter of that is
    allowed. Verification divides q by its sum, as drawing does, so this tolerance does not limit its
    exactness.
    """
    kept, wide = torch.finfo(q.dtype), torch.finfo(torch.promote_types(q.dtype, torch.float32))
    entries = 2 * kept.eps + q.shape[-1] * kept.tiny * kept.eps / 2
    return entries + (ROUNDINGS + q.shape[-1] / LANES / 16) * wide.eps

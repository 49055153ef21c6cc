"""Numbers of the target that are not finite: found in what a round reads anyway, and traced to a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.model.target import LAST, Target

ADVICE = "load it in another dtype (target.dtype=float32), or check its weights"
FINE = " (those of a plain pass over the same text are)"


def broken_slot(logits: Tensor, draft: Draft) -> Tensor:
    """(B,) 1 + the first slot of each row whose logits are not finite, 0 if all are.

    A slot is broken if its largest logit is no number: NaN, +inf, or -inf of all tokens. Tokens that are
    masked with -inf are no fault. Never synchronises with the device.

    Args:
        logits: (B, S, V) of the target.
        draft: whose slots they are.
    """
    read = F.pad(draft.tokens != PAD, (1, 0), value=True)  # (B, S) the root, and nodes that exist
    broken = ~logits.amax(-1).isfinite() & read
    return torch.where(broken.any(-1), broken.int().argmax(-1) + 1, 0)


def not_finite(target: Target, texts: Sequence[Sequence[int]], name: str) -> UserError:
    """The error about logits that are not finite, with the first layer whose numbers are not.

    Args:
        target: that gave the logits.
        texts: up to the token behind which they are; others are looked at where a plain pass over the first
            is finite.
        name: of the text.
    """
    origins = ((text, _origin(target, text)) for text in texts)
    text, origin = next((found for found in origins if found[1] != FINE), (texts[0], FINE))
    return UserError(
        f"the target's logits are not finite behind token {len(text)} of {name}{origin}: {ADVICE}"
    )


def check_states(target: Target, states: Tensor, texts: Sequence[Sequence[int]], name: str) -> None:
    """Refuse hidden states that are not finite; waits for the device.

    Args:
        target: that gave the states.
        states: (B, T, D) input of the head at right-padded texts.
        texts: B token ids.
        name: of such a text.

    Raises:
        UserError: a state is not finite.
    """
    finite = states.isfinite().all(-1)  # (B, T)
    if finite.all():
        return
    for text, places in zip(texts, finite.tolist(), strict=True):
        if False in places[: len(text)]:
            raise not_finite(target, [text[: places.index(False) + 1]], name)


def check_logits(target: Target, logits: Tensor, text: Sequence[int], first: int, name: str) -> None:
    """Refuse logits that are not finite, as `broken_slot` finds them; waits for the device.

    Args:
        target: that gave the logits.
        logits: (n, V) behind tokens `first` - 1, `first`, ... of the text.
        text: token ids.
        first: tokens of the text up to the first row.
        name: of the text.

    Raises:
        UserError: a row is not finite.
    """
    finite = logits.amax(-1).isfinite().tolist()
    if False in finite:
        raise not_finite(target, [text[: first + finite.index(False)]], name)


@torch.no_grad()
def _origin(target: Target, text: Sequence[int]) -> str:
    """Where a plain pass over the text first has a number that is not finite; "" if that cannot be found."""
    if target.source:  # another program runs the layers
        return ""
    layers, taps, transform = len(target.layers), target.taps, target.tap_transform
    try:
        target.taps, target.tap_transform = (*range(layers), LAST), None
        states = target.read(torch.tensor([list(text)], device=target.device))
    except RuntimeError:  # out of memory, or layers that do not run this way
        return ""
    finally:
        target.taps, target.tap_transform = taps, transform
    finite = states.taps.isfinite().flatten(0, 1).flatten(2).all(-1).all(0).tolist()  # (L + 1,)
    if False not in finite:
        if target.head(states.last[:, -1]).amax(-1).isfinite().all():
            return FINE
        return " (the head's product is the first that is not)"
    first = finite.index(False)
    return " (its embedding is not)" if not first else f" (the output of layer {first - 1} is the first)"

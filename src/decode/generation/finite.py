"""Detection of target outputs that are not finite, and the layer that they come from."""

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
    """(B,) 1 + the first slot with logits that are not finite in each row, 0 if there is none.

    A slot is broken if its largest logit is NaN, +inf, or -inf for all tokens. Tokens masked with -inf
    are allowed. Never synchronises with the device.

    Args:
        logits: (B, S, V) of the target.
        draft: draft with these slots.
    """
    read = F.pad(draft.tokens != PAD, (1, 0), value=True)  # (B, S) the root, and nodes that exist
    broken = ~logits.amax(-1).isfinite() & read
    return torch.where(broken.any(-1), broken.int().argmax(-1) + 1, 0)


def not_finite(target: Target, texts: Sequence[Sequence[int]], name: str) -> UserError:
    """Error for logits that are not finite; names the first layer with such numbers.

    Args:
        target: target with these logits.
        texts: texts up to the broken token; later ones are tried if a plain pass over the first is finite.
        name: name of the text.
    """
    origins = ((text, _origin(target, text)) for text in texts)
    text, origin = next((found for found in origins if found[1] != FINE), (texts[0], FINE))
    return UserError(
        f"the target's logits are not finite after token {len(text)} of {name}{origin}: {ADVICE}"
    )


def check_states(target: Target, states: Tensor, texts: Sequence[Sequence[int]], name: str) -> None:
    """Check that hidden states are finite; synchronises with the device.

    Args:
        target: target with these states.
        states: (B, T, D) input of the head at right-padded texts.
        texts: B token ids.
        name: name of the texts.

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
    """Check that logits are finite, like `broken_slot`; synchronises with the device.

    Args:
        target: target with these logits.
        logits: (n, V) after tokens `first` - 1, `first`, ... of the text.
        text: token ids.
        first: number of tokens up to the first row.
        name: name of the text.

    Raises:
        UserError: a row is not finite.
    """
    finite = logits.amax(-1).isfinite().tolist()
    if False in finite:
        raise not_finite(target, [text[: first + finite.index(False)]], name)


@torch.no_grad()
def _origin(target: Target, text: Sequence[int]) -> str:
    """First part of a plain pass over the text with a number that is not finite; "" if unknown."""
    if target.source:  # an engine runs the layers
        return ""
    layers, taps, transform = len(target.layers), target.taps, target.tap_transform
    try:
        target.taps, target.tap_transform = (*range(layers), LAST), None
        states = target.read(torch.tensor([list(text)], device=target.device))
    except RuntimeError:  # out of memory, or layers that do not support it
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

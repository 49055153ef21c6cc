"""Warpers: map logits to the distribution from which tokens are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from decode.errors import UserError

BLOCK = 1024  # values per block of `_argmax`
MANY = 40_000  # number of values from which on `_argmax` takes two steps
RANGES = {  # in words
    "temperature": "0 or more",
    "top_k": "a whole number, 0 or more",
    "top_p": "more than 0, at most 1",
    "min_p": "0 to 1",
    "repetition_penalty": "more than 0, 1 changes nothing",
}
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Sampler:
    """Warpers, in the order of Hugging Face `generate`; greedy decoding is temperature 0.

    Acceptance, residual and extra token share this object, so none of them can omit a warper.

    Args:
        temperature: divides the logits; 0 puts all mass on the first maximum. A value below the smallest
            normal float32 becomes 0, because no two logits are that close.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p.
        min_p: drop tokens below min_p times the largest probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in
            the sequence (Keskar et al., arXiv:1909.05858).

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        ok = {
            "temperature": 0 <= _real(self.temperature) <= LARGEST,
            "top_k": _is_number(self.top_k, Integral) and self.top_k >= 0,
            "top_p": 0 < _real(self.top_p) <= 1,
            "min_p": 0 <= _real(self.min_p) <= 1,
            "repetition_penalty": SMALLEST <= _real(self.repetition_penalty) <= LARGEST,
        }
        for name, valid in ok.items():
            if not valid:
                shown = _shown(getattr(self, name))
                raise UserError(f"sampling: {name}={shown} is out of range: give {RANGES[name]}")
        if self.temperature < SMALLEST:
            object.__setattr__(self, "temperature", 0.0)  # sets a field of a frozen dataclass

    @property
    def needs_history(self) -> bool:
        """Whether the distribution depends on the tokens before it."""
        return self.repetition_penalty != 1.0

    def probs(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """(R, V) logits -> (R, V) probabilities, fp32 or wider.

        Args:
            logits: (R, V) of a model.
            seen: (R, V) bool, tokens of the sequence so far; needed by the repetition penalty.
        """
        z = self._penalize(logits, seen)
        if self.temperature == 0:
            return torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1.0)
        # Shift the largest to 0 first, so that a small temperature cannot produce two infinite logits.
        z = (z - z.amax(-1, keepdim=True)).div_(self.temperature)
        if 0 < self.top_k < z.shape[-1]:
            z = z.masked_fill(z < z.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, index = z.sort(descending=True, stable=True)
            mass = _softmax(ordered)
            before = mass.cumsum(-1) - mass  # mass of higher-ranked tokens
            drop = torch.zeros_like(z, dtype=torch.bool).scatter(-1, index, before >= self.top_p)
            z = z.masked_fill(drop, -torch.inf)
        if self.min_p > 0:
            p = _softmax(z)
            z = z.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -torch.inf)
        return _softmax(z)

    def argmax(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """(R, V) logits -> (R,) the token that has all mass at temperature 0."""
        # A cast to fp32 would not change the order, so it is skipped.
        return _argmax(self._penalize(logits, seen) if self.needs_history else logits)

    def _penalize(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Cast to fp32 or wider and apply the repetition penalty."""
        z = logits if logits.dtype == torch.float64 else logits.float()
        if not self.needs_history:
            return z
        assert seen is not None
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(z > 0, z / penalty, z * penalty), z)


def _softmax(z: Tensor) -> Tensor:
    """(R, V) -> (R, V) probabilities whose sum is 1 up to a few roundings; without gradients.

    A CPU's softmax adds the V terms in a few running sums, so rounding errors grow with V. `sum` adds in
    blocks and is more exact.
    """
    p = z.softmax(-1)
    return p.div_(p.sum(-1, keepdim=True))


def _is_number(value: object, kind: type = Real) -> bool:
    """Whether it is a number of this kind; bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Format a value for a message; texts are quoted, because they may look like numbers."""
    return f"{value}"[:40] if isinstance(value, Real) else f"{value!r}"[:40]


def _real(value: object) -> float:
    """Convert to float; NaN, which is in no range, if it is not a number."""
    try:
        return float(value) if isinstance(value, Real) and _is_number(value) else math.nan
    except OverflowError:
        return math.inf


def _argmax(x: Tensor) -> Tensor:
    """(R, V) -> (R,) index of the first largest value.

    `max` returns the first of equal values, like `argmax`, but faster. On a CPU the largest value of each
    block is found without its index, which is much faster; then the index in the best block is found.
    """
    block = math.gcd(x.shape[-1], BLOCK)
    if x.device.type != "cpu" or x.numel() < MANY or block < BLOCK // 8:
        return x.max(-1).indices
    blocks = x.unflatten(-1, (-1, block))  # (R, V / block, block)
    first = blocks.amax(-1).max(-1).indices  # (R,)
    return first * block + blocks[torch.arange(len(x)), first].max(-1).indices

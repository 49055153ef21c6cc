"""`topk`: accept one of the target's most probable tokens, everywhere or between two tags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.lossy.accepting import Relaxed
from decode.verification.target_probs import TargetProbs

TAGS = 2  # begin and end of a part of the text


@dataclass
class Tagged:
    """Whether each text is between two tags.

    Attributes:
        inside: (B,) bool.
        opening: token id of the first tag.
        closing: token id of the second tag.
    """

    inside: Tensor
    opening: int
    closing: int

    def after(self, tokens: Tensor) -> Tagged:
        """State after (B, M) more tokens, `PAD` included: the last tag decides."""
        order = torch.arange(tokens.shape[1], device=tokens.device)
        opened, closed = (
            torch.where(tokens == tag, order, -1).amax(1) for tag in (self.opening, self.closing)
        )
        return replace(self, inside=torch.where(opened == closed, self.inside, opened > closed))


@dataclass(frozen=True)
class TopK(Relaxed):
    """Accept one of the `top` most probable tokens x with p(x) >= `ratio` max p.

    SpecDec, arXiv:2203.16487; relaxed acceptance in TensorRT-LLM.

    Args:
        top: number of tokens.
        ratio: share of the largest probability.
        within: two tags, such as <think> and </think>; outside of them it is `match`. Token ids, or texts
            until `for_tokenizer`. Empty: it applies everywhere.

    Raises:
        UserError: a number out of range, or not two different tags.
    """

    name = "topk"
    top: int = 3
    ratio: float = 0.3
    within: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "within", tuple(self.within))  # hashable
        if self.top < 1 or not 0 < self.ratio <= 1:
            raise UserError(
                f"decode.rule: top={self.top} must be at least 1, ratio={self.ratio} above 0 and at most 1"
            )
        plain = all(isinstance(tag, int | str) and not isinstance(tag, bool) for tag in self.within)
        if self.within and not (plain and len(set(self.within)) == TAGS):
            raise UserError(
                f"decode.rule.within={list(self.within)}: give two different tags, as in [<think>, </think>]"
            )

    @property
    @override
    def title(self) -> str:
        text = super().title
        return f"{text} within {self.within[0]} {self.within[1]}" if self.within else text

    @override
    def acceptable(self, p: Tensor) -> Tensor:
        kth = p.topk(min(self.top, p.shape[-1])).values[..., -1:]
        return (p >= kth) & (p >= self.ratio * p.amax(-1, keepdim=True))

    @override
    def for_tokenizer(self, tokenizer: Any) -> Self:
        ids = []
        for tag in self.within:
            found = [tag] if isinstance(tag, int) else tokenizer.encode(tag, add_special_tokens=False)
            if len(found) != 1:
                raise UserError(
                    f"decode.rule.within: {tag!r} is {len(found)} tokens of the target; give tags of one "
                    "token, or ids"
                )
            ids += found
        return replace(self, within=tuple(ids))

    @override
    def follow(self, tokens: Tensor) -> Tagged | None:
        if not self.within:
            return None
        first, last = self.within
        if isinstance(first, str) or isinstance(last, str):
            raise UserError(
                f"decode.rule.within={[first, last]}: give token ids here, see `Rule.for_tokenizer`"
            )
        outside = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return Tagged(outside, first, last).after(tokens)

    @override
    def here(self, target: TargetProbs) -> Tensor | None:
        return target.state.inside if isinstance(target.state, Tagged) else None

    @override
    def applies(self, text: Tensor) -> bool:
        followed = self.follow(text)
        return followed is None or bool(followed.inside)

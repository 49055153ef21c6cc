"""Base of drafters with a token bias on the logits of all depths."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.model.head import Head
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import Coin
from decode.sampling import Sampler
from drafters.base import Drafter
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.drafting.tree import expand
from drafters.layers.token_bias import TokenBias, TokenInfoBias
from drafters.vocabulary import TokenCounts


class TokenBiasDrafter(Drafter):
    """A drafter that computes the states of all depths before any token, optionally with a token bias."""

    info: TokenBias | None

    def add_token_bias(
        self, kind: str, hidden_size: int, vocab_size: int, rank: int, hot_tokens: int
    ) -> None:
        """Create the bias, unless `kind` is `none`."""
        draft_vocab_size = None if self.d2t is None else len(self.d2t)
        sizes = (hidden_size, vocab_size, rank, hot_tokens)
        self.info = None if kind == "none" else TokenInfoBias(kind, *sizes, draft_vocab_size=draft_vocab_size)

    def biased_head(self, head: Head) -> Head:
        """The head over the draft vocabulary, with the bias added to its logits."""
        head = self.output_head(head)
        if self.info is None:
            return head
        side = self.info.side(head.d2t is not None)
        if self.training and head.d2t is not None and self.info.hot is not None:
            side = side._replace(ids=torch.searchsorted(head.d2t, self.info.hot))
        return replace(head, side=side)

    def expand_levels(
        self,
        levels: ParallelLogits,
        sampler: Sampler,
        coin: Coin,
        plan: Plan,
        limit: Tensor | None = None,
    ) -> Draft:
        """Draft from the logits of all depths, the first (B,) `limit` of which are valid; None: all."""
        confidence = self.confidence_of(lambda: levels.newest)
        return expand(levels.first, levels.step, sampler, coin, plan, levels.vocabulary, confidence, limit)

    @override
    def choose_tokens(self, counts: TokenCounts, target: Target) -> str:
        lines = [] if self.d2t is None else [super().choose_tokens(counts, target)]
        if isinstance(self.info, TokenInfoBias) and self.info.hot is not None:
            lines.append(self.info.choose(counts, self.d2t, target.dtype))
        return "; ".join(lines)

    @property
    @override
    def fewest_tokens(self) -> int:
        # The draft vocabulary contains the hot tokens; one more, since `rows` exists only if it is larger.
        hot = None if self.info is None else self.info.hot
        return super().fewest_tokens if hot is None else max(super().fewest_tokens, len(hot) + 1)

    @property
    @override
    def needs_fit(self) -> bool:
        return super().needs_fit or (self.info is not None and self.info.hot is not None)

"""P-EAGLE (arXiv:2602.01469; ParallelSpec, arXiv:2410.05589): EAGLE-3 that drafts all depths in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.draft import Draft
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.drafting.tree import expand
from drafters.families.recurrent import RecurrentState
from drafters.models.eagle3 import Eagle3
from drafters.vocabulary import Vocabulary


class PEagle(Eagle3):
    """EAGLE-3 with masks for depths from 2: learned vectors instead of token and feature.

    Masks attend causally to settled pairs and earlier masks. No drafted token enters a state, so all masks
    run in one pass and all logits are one head product. q at depth 2 is the same below every token of depth
    1: a tree is the product of the depths' top tokens.

    `unroll` is EAGLE-3's with masks fed back: a step attends to the first step up to its anchor and to
    its own anchor's later steps, as in the paper. With `anchors`, depths from 2 train on a sample of the
    anchors; the paper uses fewer at larger depths.

    Args:
        depth: depths unrolled in training, and the maximum draft length: later masks would attend to
            more masks than in training.
        **options: of `Eagle3`, without `norm_output`: no output is fed back.
    """

    warm_starts_from = "eagle3"

    def __init__(self, depth: int, **options: Any) -> None:
        super().__init__(depth=depth, norm_output=False, **options)
        del self.settings["norm_output"]
        size = len(self.norm.weight)
        # Small, since it is the first layer's residual; not 0, where a norm's gradient is largest.
        self.mask_token = nn.Parameter(0.02 * torch.randn(size))
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(size))

    def adopt_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """EAGLE-3's have the same names."""
        return weights

    @property
    @override
    def max_depth(self) -> int:
        """Number of depths in training."""
        return self.depth

    @override
    def drafted_projection(self, shares: Tensor, rows: Tensor) -> Tensor:
        first, size = self.stack[0], len(self.mask_token)
        token, product = first.input_layernorm(self.mask_token[None]), first.qkv_proj
        return F.linear(token, product.weight[:, :size], product.bias).expand(len(rows), -1)

    @override
    def emit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), self.mask_hidden.to(x.dtype).expand_as(x)

    @override
    def propose(
        self, state: RecurrentState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        self.check(plan)
        head = self.head(target)
        states = self._states(state, plan.depth)
        levels = ParallelLogits(
            head.product(states).unbind(1), states, head, vocabulary=Vocabulary.of(head, target)
        )
        confidence = self.confidence_of(lambda: levels.newest)
        return expand(levels.first, levels.step, sampler, coin, plan, levels.vocabulary, confidence)

    def _states(self, state: RecurrentState, depth: int) -> Tensor:
        """(B, K, D) states of all depths; keys and values of the masks stay in scratch slots."""
        assert state.newest is not None
        x, rows = state.newest, len(state.newest)
        if depth > 1:
            token, feature = (m.expand(rows, depth - 1, -1) for m in (self.mask_token, self.mask_hidden))
            step = torch.arange(depth - 1, device=x.device)
            block = (step[:, None] >= step).expand(rows, -1, -1)
            masks = self.run_layers(state.store, self.pair(token, feature), block, step)
            x = torch.cat([x, masks], 1)
        return self.emit(x)[0]

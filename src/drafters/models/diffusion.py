"""Block diffusion drafter after DFlash (arXiv:2602.06036), adapted to small targets and little data.

The backbone is trained from scratch on the target's features, for one denoising step; for an external
masked diffusion LM see `hf_dllm`. Objectives for long accepted prefixes (SpecDiff-2, arXiv:2511.00606;
D-PACE, arXiv:2605.18810) are settings of `objective` and `weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from decode.kernels.packed_linear import Linear
from decode.model.target import Tap, Target
from drafters.families.block import BlockDrafter
from drafters.layers.decoder_layer import LayerShape, RMSNorm


class Diffusion(BlockDrafter):
    """Differs from DFlash in what is fused and where it goes: taps, each normalised, together with the token
    behind them, as EAGLE's pairs. The root's place is the newest pair; the first layer computes it alone and
    predicts the first token. In the other layers a mask begins as the root's state and a learned vector.

    The context and the root share one map, so that keys and values learn of the tokens as soon as the root
    does: with a map for each it hardly learns to copy from the text (docs/drafters/diffusion.md).

    Args:
        taps: layer ids (inputs of decoder layers) or "last".
        depth: tokens that a block predicts, K: the root and K - 1 masks.
        **options: of `BlockDrafter`, without `qk_norm`.
    """

    root_predicts = root_first = True

    def __init__(self, taps: Sequence[Tap], depth: int, **options: Any) -> None:
        super().__init__(taps=taps, depth=depth, **options)
        self.settings = {"taps": list(taps), "depth": depth} | options
        hidden_size, eps = self.shape.hidden_size, self.shape.eps
        self.fc = Linear((1 + len(taps)) * hidden_size, hidden_size, bias=False)
        self.tap_norms = nn.ModuleList(RMSNorm(hidden_size, eps=eps) for _ in taps)
        self.mask = nn.Parameter(torch.zeros(self.masks, hidden_size))
        self.norm = nn.Identity()  # the size of a state says how sure it is

    @override
    @classmethod
    @torch.no_grad()
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Initialised so that every place is the newest tap, and a mask as large.

        The masks have to differ from the start: places that are alike ask one set of weights for different
        tokens, and grow apart slowly.
        """
        sizes: dict[str, Any] = asdict(LayerShape.of(target)) | {"vocab_size": target.vocab_size}
        drafter = cls(**sizes | options)
        drafter.zero_layer_outputs()
        size = target.hidden_size
        drafter.mask.normal_()  # the feature is normalised, too
        drafter.fc.weight.normal_(std=0.32 * size**-0.5)
        drafter.fc.weight[:, -size:] += torch.eye(size)
        return drafter

    @override
    def fuse(self, taps: Tensor, following: Tensor) -> Tensor:
        normed = [norm(tap) for norm, tap in zip(self.tap_norms, taps.unbind(-2), strict=True)]
        return self.context_norm(self.fc(torch.cat([following, *normed], -1)))

    @override
    def inputs(self, root: Tensor, newest: Tensor) -> Tensor:
        del root
        return self.places(newest)

"""Block diffusion drafter after DFlash (arXiv:2602.06036), adapted to small targets and little data.

Trained from scratch on the target's features, for one denoising step; `hf_dllm` drafts with an external
masked diffusion LM. Objectives for long accepted prefixes (SpecDiff-2, arXiv:2511.00606;
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
    """Block diffusion over pairs of feature and next token, as in EAGLE; each tap is normalised.

    The input at the root is the newest pair. The first layer computes only the root and predicts the first
    token. The other layers read masks, each the sum of the root's state and a learned vector.

    Context and root share one fusion. With a separate one for each, the drafter hardly learns to copy from
    the text (docs/drafters/diffusion.md).

    Args:
        taps: layer ids (inputs of decoder layers) or "last".
        depth: K, tokens predicted by a block: by the root and K - 1 masks.
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
        self.norm = nn.Identity()  # keeps the size of a state, a measure of confidence

    @override
    @classmethod
    @torch.no_grad()
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Initialise every place to the newest tap, plus a random vector of the same size for masks.

        Equal masks would need the same weights to predict different tokens, and would diverge slowly.
        """
        sizes: dict[str, Any] = asdict(LayerShape.of(target)) | {"vocab_size": target.vocab_size}
        drafter = cls(**sizes | options)
        drafter.zero_layer_outputs()
        size = target.hidden_size
        drafter.mask.normal_()  # as large as the normalised feature
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

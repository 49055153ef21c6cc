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
from decode.model.target import LAST, Tap, Target
from drafters.families.block import BlockDrafter
from drafters.layers.decoder_layer import LayerShape, RMSNorm


class Diffusion(BlockDrafter):
    """Differs from DFlash in four ways: the root predicts the first token, as DSpark's does; the newest
    feature and the root's embedding are added at every place of a block; each mask is a learned vector; and
    taps are normalised before they are fused.

    Args:
        taps: layer ids (inputs of decoder layers) or "last"; the last tap is added in the block.
        depth: tokens that a block predicts, K: the root and K - 1 masks.
        per_depth: every place has a map of its own of what is added, as Medusa's heads have.
        **options: of `BlockDrafter`, without `qk_norm`.
    """

    root_predicts = root_alone = True

    def __init__(self, taps: Sequence[Tap], depth: int, per_depth: bool = False, **options: Any) -> None:
        super().__init__(taps=taps, depth=depth, **options)
        self.settings = {"taps": list(taps), "depth": depth, "per_depth": per_depth} | options
        hidden_size, eps = self.shape.hidden_size, self.shape.eps
        self.fc = Linear((1 + len(taps)) * hidden_size, hidden_size, bias=False)
        self.tap_norms = nn.ModuleList(RMSNorm(hidden_size, eps=eps) for _ in taps)
        self.mask = nn.Parameter(torch.zeros(self.masks, hidden_size))
        maps = 1 + self.masks if per_depth else 1
        self.place_in = Linear(2 * hidden_size, maps * hidden_size, bias=False)

    @override
    @classmethod
    @torch.no_grad()
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Initialised so that every place is the newest feature, and a mask as large.

        The masks have to differ from the start: places that are alike ask one set of weights for different
        tokens, and grow apart slowly.
        """
        options["taps"] = _taps(options["taps"], len(target.layers))
        sizes: dict[str, Any] = asdict(LayerShape.of(target)) | {"vocab_size": target.vocab_size}
        drafter = cls(**sizes | options)
        drafter.zero_layer_outputs()
        size = target.hidden_size
        drafter.mask.normal_()  # the feature is normalised, too
        root, feature = drafter.place_in.weight.unflatten(0, (-1, size)).chunk(2, -1)  # (maps, D, D) each
        root.normal_(std=0.32 * size**-0.5)
        feature.copy_(torch.eye(size))
        drafter.fc.weight.normal_(std=0.32 * size**-0.5)
        drafter.fc.weight[:, -size:] += torch.eye(size)
        return drafter

    @override
    def fuse(self, taps: Tensor, following: Tensor) -> Tensor:
        normed = [norm(tap) for norm, tap in zip(self.tap_norms, taps.unbind(-2), strict=True)]
        return self.context_norm(self.fc(torch.cat([following, *normed], -1)))

    @override
    def inputs(self, root: Tensor, newest: Tensor) -> Tensor:
        both = torch.cat([root, self.tap_norms[-1](newest)], -1)
        return self.places(root) + self.place_in(both).unflatten(-1, (-1, root.shape[-1]))


def _taps(taps: Sequence[Tap] | None, n: int) -> list[Tap]:
    """The configured taps; by default four for n layers, evenly from 1 to n - 3, and the head's input."""
    if taps is not None:
        return list(taps)
    even = {round(1 + i * (n - 4) / 4) for i in range(4)} if n > 4 else {n // 2}
    return [*sorted(even), LAST]

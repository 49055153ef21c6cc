"""DFlash block diffusion (arXiv:2602.06036), identical to the authors' code, speculators and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Tap, Target
from drafters.families.block import BlockDrafter
from drafters.layers.decoder_layer import LayerShape
from drafters.vocabulary import token_embedding, unused_token


class DFlash(BlockDrafter):
    """All masks are the target's embedding of one unused token and differ by position only; queries and
    keys are normalised (Qwen3's layer).

    Args:
        mask_id: id of that token.
        **options: of `BlockDrafter`, without `qk_norm`, `steps` and the token bias.
    """

    def __init__(self, mask_id: int, **options: Any) -> None:
        super().__init__(qk_norm=True, **options)
        self.settings = {"mask_id": mask_id} | options | {"taps": list(options["taps"])}
        self.register_buffer("mask", torch.zeros(1, self.shape.hidden_size), persistent=False)

    @override
    @classmethod
    @torch.no_grad()
    def for_target(cls, target: Target, **options: Any) -> Self:
        options["taps"] = _taps(options["taps"], len(target.layers))
        token = options["mask_id"]
        options["mask_id"] = unused_token(target) if token is None else token
        if not 0 <= options["mask_id"] < target.vocab_size:
            raise UserError(f"drafter.mask_id={token}: the target has the ids 0 to {target.vocab_size - 1}")
        if not token_embedding(target, options["mask_id"]).any():  # all masks would compute the same
            raise UserError(f"drafter.mask_id={token}: its embedding is 0; choose another token")
        sizes: dict[str, Any] = asdict(LayerShape.of(target)) | {"vocab_size": target.vocab_size}
        drafter = cls.restore(sizes | options, target)
        drafter.zero_layer_outputs()
        return drafter

    @override
    @classmethod
    @torch.no_grad()
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        drafter = cls(**settings)
        drafter.mask.copy_(token_embedding(target, settings["mask_id"]))
        return drafter

    @override
    def fuse(self, taps: Tensor) -> Tensor:
        return self.context_norm(self.fc(taps.flatten(-2)))

    @override
    def inputs(self, root: Tensor, newest: Tensor) -> Tensor:
        del newest
        return self.places(root)


def _taps(taps: Sequence[Tap] | None, n: int) -> list[Tap]:
    """The configured taps; by default the paper's five for n layers, evenly from 2 to n - 2."""
    if taps is not None:
        return list(taps)
    return [*sorted({round(2 + i * (n - 4) / 4) for i in range(5)} if n > 4 else {n // 2})]

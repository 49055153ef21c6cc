"""DFlash block diffusion (arXiv:2602.06036), and DSpark (arXiv:2607.05147), DFlash with a token bias.

Both are identical to the authors' code, speculators and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.model.head import Head
from decode.model.target import Tap, Target
from drafters.families.block import BlockDrafter
from drafters.layers.decoder_layer import LayerShape
from drafters.layers.token_bias import MarkovBias
from drafters.vocabulary import token_embedding, unused_token


class DFlash(BlockDrafter):
    """Block diffusion with one mask: the target's embedding of an unused token, the same at all positions.

    Queries and keys are normalised, as in Qwen3's layer.

    Args:
        mask_id: id of the unused token.
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
        options["taps"] = _resolve_taps(options["taps"], len(target.layers))
        token = options["mask_id"]
        options["mask_id"] = unused_token(target) if token is None else token
        if not 0 <= options["mask_id"] < target.vocab_size:
            raise UserError(f"drafter.mask_id={token}: the target has the ids 0 to {target.vocab_size - 1}")
        if not token_embedding(target, options["mask_id"]).any():  # would make all masks equal
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
    def fuse(self, taps: Tensor, following: Tensor) -> Tensor:
        del following
        return self.context_norm(self.fc(taps.flatten(-2)))

    @override
    def inputs(self, root: Tensor, newest: Tensor) -> Tensor:
        del newest
        return self.places(root)


class DSpark(DFlash):
    """DFlash's block, with a bias of the previous token on the logits (`MarkovBias`).

    A confidence head reads the hidden state and the previous token's row of the bias.

    Args:
        markov_rank: r of the bias.
        sample_from_anchor: whether the root predicts the first token, as in DeepSpec, so a block has K
            places; otherwise K masks predict, as in DFlash.
        draft_vocab_size: V', number of tokens that it drafts and trains on; None: all.
        **options: of `DFlash`.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self,
        markov_rank: int,
        sample_from_anchor: bool,
        draft_vocab_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(draft_vocab_size=draft_vocab_size, **options)
        self.settings |= {"markov_rank": markov_rank, "sample_from_anchor": sample_from_anchor}
        self.root_predicts = sample_from_anchor
        self.info = MarkovBias(options["vocab_size"], markov_rank, draft_vocab_size)

    @property
    @override
    def state_size(self) -> int:
        return self.shape.hidden_size + self.settings["markov_rank"]

    @override
    def output_head(self, head: Head) -> Head:
        # Also in training: the bias has no rows for other tokens.
        return self._head_rows.of(head, self.d2t, self.int8 and not self.training)

    @override
    def resize_vocabulary(self, size: int) -> None:
        super().resize_vocabulary(size)
        assert isinstance(self.info, MarkovBias)
        self.info.resize(size)


def _resolve_taps(taps: Sequence[Tap] | None, n: int) -> list[Tap]:
    """The configured taps; default: the paper's five for n layers, evenly spaced from 2 to n - 2."""
    if taps is not None:
        return list(taps)
    return [*sorted({round(2 + i * (n - 4) / 4) for i in range(5)} if n > 4 else {n // 2})]

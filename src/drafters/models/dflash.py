"""DFlash block diffusion (arXiv:2602.06036), and DSpark (arXiv:2607.05147), which adds a bias to it.

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
    def fuse(self, taps: Tensor, following: Tensor) -> Tensor:
        del following
        return self.context_norm(self.fc(taps.flatten(-2)))

    @override
    def inputs(self, root: Tensor, newest: Tensor) -> Tensor:
        del newest
        return self.places(root)


class DSpark(DFlash):
    """DFlash's block, whose logits get a bias of the previous token (`MarkovBias`), one after the other.

    A confidence head reads that token's row of the bias and the hidden state.

    Args:
        markov_rank: r of the bias.
        sample_from_anchor: the root predicts the first token, as in DeepSpec, so that a block of K places
            drafts K tokens; else K masks do, as in DFlash.
        draft_vocab_size: V' of the tokens that it drafts and is trained over; None: all.
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
        # In training, too: the bias has no rows of other tokens.
        return self._head_rows.of(head, self.d2t, self.int8 and not self.training)

    @override
    def resize_vocabulary(self, size: int) -> None:
        super().resize_vocabulary(size)
        assert isinstance(self.info, MarkovBias)
        self.info.resize(size)


def _taps(taps: Sequence[Tap] | None, n: int) -> list[Tap]:
    """The configured taps; by default the paper's five for n layers, evenly from 2 to n - 2."""
    if taps is not None:
        return list(taps)
    return [*sorted({round(2 + i * (n - 4) / 4) for i in range(5)} if n > 4 else {n // 2})]

"""Medusa (Cai et al., arXiv:2401.10774): one head per depth, all on the same feature.

Medusa-1 keeps the target frozen; Medusa-2 tunes it together with the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import upload
from drafters.base import Batch, DraftStep, ParamGroup, constructor_arguments
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.families.feature_heads import FeatureHeadsDrafter, FeatureState, check_positive
from drafters.families.token_bias_drafter import TokenBiasDrafter
from drafters.hf.tuned_target import Lora
from drafters.layers.anchor_rows import rows_by_depth
from drafters.layers.lm_heads import PerDepthHeads, ResBlock
from drafters.layers.token_bias import TeacherForcedBias
from drafters.vocabulary import Vocabulary


class Medusa(TokenBiasDrafter, FeatureHeadsDrafter):
    """Head j reads only the feature f_t, no token, and predicts x_{t+1+j}.

    Depths are independent given the context: q at depth 2 is the same below every token of depth 1, so
    the logits of all depths are computed at once, and a tree is the product of the depths' top tokens.
    With `token_info` each token adds a bias to the next logits, as in DSpark (arXiv:2607.05147).

    Args:
        hidden_size: D of the target.
        vocab_size: V of the target.
        depth: number of heads K, the maximum draft length.
        layers: residual layers of a head.
        own_head: each depth has its own output head, initialised with the target's and trained
            (K V D weights); otherwise all share the target's frozen head.
        token_info: `none`, or a kind of `TokenInfoBias`.
        info_rank: rank of the bias.
        hot_tokens: vocabulary of the bias.
        bias: whether residual layers have a bias, as in the authors' checkpoints.
        draft_vocab_size: see `Drafter`.

    Raises:
        UserError: no head, or a head without a layer.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        depth: int,
        layers: int,
        own_head: bool,
        token_info: str = "none",
        info_rank: int = 1,
        hot_tokens: int = 1,
        bias: bool = False,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(draft_vocab_size)
        self.settings = constructor_arguments(locals())
        check_positive(depth=depth, layers=layers)
        self.depth = depth
        self.blocks = nn.ModuleList(ResBlock(hidden_size, layers, bias) for _ in range(depth))
        self.lm_heads = PerDepthHeads(hidden_size, vocab_size, depth if own_head else 0)
        self.add_token_bias(token_info, hidden_size, vocab_size, info_rank, hot_tokens)

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        drafter = cls(hidden_size=target.hidden_size, vocab_size=target.vocab_size, **options)
        drafter.lm_heads.copy_head(target.head)
        return drafter

    # -- training ----------------------------------------------------------------------------

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        return self._unroll(batch.taps[:, :, 0], batch, target)

    def _unroll(self, features: Tensor, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Run every head on (B, T, D) features."""
        features = features.flatten(0, 1)  # (B * T, D)
        teaching = TeacherForcedBias(self.info, batch.tokens)
        supervised = rows_by_depth(batch.loss_mask, self.depth, features.device)
        for depth, (rows, block) in enumerate(zip(supervised, self.blocks, strict=False), 1):
            hidden = teaching.with_bias_input(block(features[rows.place].to(self.dtype)), rows.place, depth)
            head = self.biased_head(self.lm_heads.head_for(depth, target.head))
            yield DraftStep(hidden, rows.anchor, depth, head, {}, copied=rows.place)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def propose(
        self, state: FeatureState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.feature is not None
        assert state.root is not None
        self.check(plan)
        hidden = [block(state.feature) for block in self.blocks[: plan.depth]]  # K of (B, D)
        states = torch.stack(hidden, 1)
        head = self.output_head(target.head)
        if self.lm_heads:
            heads = (self.output_head(self.lm_heads.head_for(j + 1, target.head)) for j in range(len(hidden)))
            raw = [one.product(h) for one, h in zip(heads, hidden, strict=True)]  # K of (B, V)
        else:
            raw = head.product(states).unbind(1)
        levels = ParallelLogits(raw, states, head, self.info, state.root, Vocabulary.of(head, target))
        return self.expand_levels(levels, sampler, coin, plan)


class Medusa2(Medusa):
    """Medusa-2: heads and a LoRA of the target are trained together (sections 2.2.2 and 2.3.2).

    The given target stays unchanged; copies are tuned. The original is the teacher of the tuned target
    at depth 0 (self-distillation) and of the heads:

        loss = divergence(original, tuned) + heads * sum_j w_j divergence(original, head j).

    Decoding is lossless with respect to the tuned target, `verifier`, not to the original.

    Args:
        lora: arguments of `Lora`.
        heads: weight of the heads' loss; the tuned target's loss has weight 1.
        warmup: share of the steps in which only the heads train; the LoRA's learning rate rises over as many
            further steps.
        lora_lr: ratio of the LoRA's learning rate to the heads'.
        **options: of `Medusa`.

    Raises:
        UserError: see `Medusa`; a number out of range.
    """

    traits = Traits(tunes_target=True)

    def __init__(
        self, lora: dict[str, Any], heads: float, warmup: float, lora_lr: float, **options: Any
    ) -> None:
        super().__init__(**options)
        self.lora = Lora(**lora)
        self.heads, self.warmup, self.lora_lr = heads, warmup, lora_lr
        self.settings |= {"lora": lora, "heads": heads, "warmup": warmup, "lora_lr": lora_lr}
        if not 0 <= warmup < 1:
            raise UserError(f"drafter.warmup={warmup}: must be from 0 to less than 1")
        for name in ("heads", "lora_lr"):
            if self.settings[name] <= 0:
                raise UserError(f"drafter.{name}={self.settings[name]}: must be more than 0")

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        lora = Lora.settings_for(target, options["lora"])
        return super().for_target(target, **options | {"lora": lora})

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        features = self.lora.read(target, batch.tokens)  # (B, T, D)
        written = F.pad(batch.loss_mask[:, 1:], (0, 1)).flatten().nonzero()[:, 0]  # (M,) on the host
        if len(written):
            place = upload(written.numpy(), features.device)
            yield DraftStep(features.flatten(0, 1)[place], written, 0, target.head, {}, copied=place)
        for step in self._unroll(features, batch, target):
            yield step._replace(weight=self.heads)

    def checkpoint_gradients(self) -> None:
        """See `optional.CheckpointsGradients`."""
        self.lora.checkpointing = True

    @override
    def param_groups(self) -> list[ParamGroup]:
        (group,) = super().param_groups()
        return self.lora.split_group(group, self._lora_rate)

    def _lora_rate(self, progress: float) -> float:
        warmed_up = min(1.0, max(0.0, progress / self.warmup - 1)) if self.warmup else 1.0
        return self.lora_lr * warmed_up

    @override
    def verifier(self, target: Target) -> Target:
        return self.lora.merge(target)

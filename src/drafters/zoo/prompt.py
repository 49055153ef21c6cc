"""Learned prompts in the verification pass: PaSS (arXiv:2311.13581), PPD (arXiv:2405.18628)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model.causal_lm import CausalLM
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts, upload_together
from drafters.base import (
    Batch,
    DraftStep,
    constructor_arguments,
    sample_anchors,
    supervised_anchors,
)
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.families.feature_heads import check_positive
from drafters.families.token_bias_drafter import TokenBiasDrafter
from drafters.hf.tuned_target import check_copied, twin_of
from drafters.layers.anchor_rows import rows_by_depth
from drafters.layers.token_bias import TeacherForcedBias
from drafters.vocabulary import Vocabulary
from drafters.zoo.prompted_target import PromptedTarget, check_embedded, read_with_prompts


@dataclass(slots=True)
class AheadState:
    """State of all rows; None before the first `advance`."""

    ahead: Tensor | None = None  # (B, K, D) outputs of the prompts after the token before the root
    root: Tensor | None = None  # (B,)


class Prompt(TokenBiasDrafter):
    """Learned vectors (prompts) that the target reads after every slot; their outputs predict the draft.

    There are E prompts for each of K depths. Those of depth j after x_t take the position of x_{t+j}, and the
    target's frozen head predicts x_{t+1+j}, the token at depth j below the root, from their mean output. Only
    the first draft of a text needs a pass of its own, and the target's distributions do not change
    (`PromptedTarget`). As in Medusa, prompts see no token after x_t, so all depths are predicted at once.

    Args:
        hidden_size: D of the target.
        vocab_size: V of the target.
        depth: K, the maximum draft length.
        anchors: places per text in a batch with trained prompts, on average; 0: all.
        token_info: `none`, or a kind of `TokenInfoBias`; it has many more weights than the prompts.
        info_rank: rank of the bias.
        hot_tokens: vocabulary of the bias.
        draft_vocab_size: see `Drafter`.
        ensemble: E, prompts of each depth; each sees those of the same index at earlier depths (PPD).

    Raises:
        UserError: an option out of range.
    """

    traits = Traits(drafts_in_verification=True)

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        depth: int,
        anchors: int,
        token_info: str,
        info_rank: int,
        hot_tokens: int,
        draft_vocab_size: int | None = None,
        ensemble: int = 1,
    ) -> None:
        super().__init__(draft_vocab_size)
        self.settings = constructor_arguments(locals())
        check_positive(depth=depth, ensemble=ensemble)
        if anchors < 0:
            raise UserError(f"drafter.anchors={anchors}: must be at least 0")
        self.depth, self.ensemble, self.anchors = depth, ensemble, anchors
        self.checkpointing = False
        self.prompts = nn.Embedding(depth * ensemble, hidden_size)  # depth by depth
        self.add_token_bias(token_info, hidden_size, vocab_size, info_rank, hot_tokens)

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        check_copied(target)
        check_embedded(target)
        drafter = cls(hidden_size=target.hidden_size, vocab_size=target.vocab_size, **options)
        with torch.no_grad():  # the mean embedding plus noise, so that prompts differ
            words = target.embed(torch.arange(target.vocab_size, device=target.device)).float()  # (V, D)
            vectors = drafter.prompts.weight
            vectors.copy_(words.mean(0).to(vectors) + 0.1 * words.std().to(vectors) * vectors)
        return drafter

    @property
    @override
    def max_depth(self) -> int:
        """Number of depths with prompts."""
        return self.depth

    def by_depth(self) -> Tensor:
        """(K, E, D) prompts."""
        return self.prompts.weight.unflatten(0, (self.depth, self.ensemble))

    # -- training ----------------------------------------------------------------------------

    def trained_model(self, target: Target) -> CausalLM:
        """The model that reads texts in training; has no prompts itself."""
        return twin_of(target, self, self.checkpointing)

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Read texts with prompts after all sampled anchors, then yield supervised rows by depth."""
        chosen, weight = self.sample(batch)
        _, ahead = self.read(batch, target, chosen)
        yield from self.depths(ahead, chosen, weight, batch, target)

    def sample(self, batch: Batch) -> tuple[Tensor, float]:
        """(A,) anchors on the host, and the number of candidates that each represents."""
        candidates = supervised_anchors(batch.loss_mask.cpu(), 1).flatten().nonzero()[:, 0]  # (N,)
        limited = self.training and self.anchors
        count = len(batch.tokens) * self.anchors if limited else len(candidates)
        chosen = sample_anchors(candidates, count, batch.seed)
        return chosen, len(candidates) / max(1, len(chosen))

    def read(self, batch: Batch, target: Target, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (B, T, D) of the texts, and (A, K, D) of the prompts after (A,) anchors."""
        (rows, length), device = batch.tokens.shape, batch.tokens.device
        row, place = chosen // length, chosen % length
        counts = torch.bincount(row, minlength=rows)  # (B,)
        number = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]  # (A,) index of each in its text
        # Texts with fewer anchors get padding prompts after their first token.
        places = place.new_zeros(rows, max(1, int(counts.max()))).index_put((row, number), place)
        lm = self.trained_model(target)
        sent = upload_together({"places": places, "row": row, "number": number}, device)
        last, ahead = read_with_prompts(lm, self.by_depth(), batch.tokens, sent["places"])
        return last, ahead[sent["row"], sent["number"]]

    def depths(
        self, ahead: Tensor, chosen: Tensor, weight: float, batch: Batch, target: Target
    ) -> Iterator[DraftStep]:
        """Supervised rows by depth, from (A, K, D) outputs after (A,) anchors; `weight` of each row."""
        supervised = rows_by_depth(batch.loss_mask, self.depth, batch.tokens.device, chosen)
        teaching, head = TeacherForcedBias(self.info, batch.tokens), self.biased_head(target.head)
        for depth, rows in enumerate(supervised, 1):
            hidden = teaching.with_bias_input(ahead[rows.row, depth - 1], rows.place, depth)
            yield DraftStep(hidden, rows.anchor, depth, head, {}, weight, copied=rows.place)

    def checkpoint_gradients(self) -> None:
        """See `optional.CheckpointsGradients`."""
        self.checkpointing = True

    # -- decoding ----------------------------------------------------------------------------

    @override
    def verifier(self, target: Target) -> Target:
        if isinstance(target, PromptedTarget):
            raise ValueError("a target would have prompts twice")
        return PromptedTarget(self.verifying(target), self.by_depth())

    def verifying(self, target: Target) -> Target:
        """The target that gets the prompts."""
        check_copied(target)
        return target

    @override
    def new_state(self, rows: int) -> AheadState:
        return AheadState()

    @override
    def advance(
        self,
        state: AheadState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        if not isinstance(target, PromptedTarget):
            raise UserError("decode with drafter.verifier(target), which reads this drafter's prompts")
        state.root = root
        if taps.shape[2]:
            end = RowInts.of(counts).on(taps.device) - 1  # (B,)
            state.ahead = taps[torch.arange(len(end), device=taps.device), end]
        else:  # a pass without a draft
            state.ahead = target.look_ahead()

    @override
    def propose(
        self, state: AheadState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.ahead is not None
        self.check(plan)
        states = state.ahead[:, : plan.depth]
        head = self.output_head(target.head)
        raw, vocabulary = head.product(states).unbind(1), Vocabulary.of(head, target)
        levels = ParallelLogits(raw, states, head, self.info, state.root, vocabulary)
        return self.expand_levels(levels, sampler, coin, plan)

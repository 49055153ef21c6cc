"""Base of the EAGLE family: autoregression over features (hidden states).

Pair i is (feature at i, embedding of x_{i+1}); decoder layers predict feature i + 1 from it.
Settled pairs contain features of the target, drafted pairs the drafter's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.model.head import Head
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Batch, Drafter, DraftStep
from drafters.drafting.tree import expand
from drafters.layers.decode_step import SharesCache, run_after
from drafters.layers.decoder_layer import DecoderLayer, Rotary, tree_visibility
from drafters.layers.text_store import TextStore
from drafters.layers.unroll import AnchorIndex, FirstLayerInput, LayerUnroll
from drafters.layers.unroll_attention import Attend, attend_unrolled
from drafters.vocabulary import Vocabulary


def add_feature_noise(batch: Batch, width: float) -> Tensor:
    """(B, T, L, D) taps plus uniform noise of half-width width * 512 / T, seeded by the batch."""
    generator = torch.Generator(batch.taps.device).manual_seed(batch.seed)
    noise = torch.rand(batch.taps.shape, generator=generator, device=batch.taps.device) - 0.5
    return batch.taps + noise * (2 * width * 512 / batch.taps.shape[1])


@dataclass(slots=True)
class RecurrentState:
    """Keys and values of the settled pairs, and the layers' output for the newest pair."""

    store: TextStore
    newest: Tensor | None = None  # (B, 1, D)


class RecurrentDrafter(Drafter):
    """A drafter that is fed its own features; subclasses define input and output of the layers.

    Attributes:
        depth: depths unrolled in training.
        anchors: mean number of positions per text that train depths from 2, drawn per batch; 0: all.
        depth_weight: weight of a depth's loss relative to the previous depth; the objective's own weights
            are multiplied by it.
        checkpointing: whether the backward pass recomputes activations of MLPs.
        attend: computes attention in training.
        detach_text: whether gradients of later depths' modules (`module_at`) stop at earlier keys and values.
        rotary: position embedding.
    """

    depth: int
    anchors = 0
    depth_weight = 1.0
    checkpointing = False
    attend: Attend = staticmethod(attend_unrolled)
    detach_text = False
    rotary: Rotary

    def __init__(self, draft_vocab_size: int | None = None) -> None:
        super().__init__(draft_vocab_size)
        self._shares = SharesCache()

    @property
    @abstractmethod
    def stack(self) -> Sequence[DecoderLayer]:
        """The decoder layers."""

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """(..., L, D) taps -> (..., D) features."""

    @abstractmethod
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n, D) embeddings and features -> the first layer's residual and its fused q, k, v."""

    def pair_by_lookup(self, target: Target) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """`pair` for (B, n) tokens and (B, n, D) features, from one product and a table of token parts.

        None: not supported, or the table cannot be built now.
        """
        del target
        return None

    @abstractmethod
    def token_projection(self, embedded: Tensor) -> Tensor:
        """(N, D) embeddings -> (N, P) the token's part of `first_input`.

        A token is paired with a feature at every depth; its part is computed once.
        """

    @abstractmethod
    def first_input(self, share: Tensor, feature: Tensor) -> FirstLayerInput:
        """`pair` before the q, k, v product, from (n, P) token projections and (n, D) features."""

    @abstractmethod
    def first_weight(self) -> Tensor:
        """(q + k + v, D) weight of the first layer's q, k, v product."""

    @abstractmethod
    def emit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output of the last layer -> input of the head, and the feature that is fed back."""

    @abstractmethod
    def head(self, target: Target) -> Head:
        """The output head."""

    def module_at(self, depth: int) -> RecurrentDrafter:
        """The module for drafted pairs of `depth` 2 or more; settled pairs always use `self`."""
        del depth
        return self

    def qkv_weights(self) -> list[Tensor]:
        """Weights of the layers' q, k, v products; the first is `first_weight`."""
        return [self.first_weight(), *(layer.qkv_proj.weight for layer in self.stack[1:])]

    def drafted_projection(self, shares: Tensor, rows: Tensor) -> Tensor:
        """(M, P) token projections of pairs that contain the drafter's own features."""
        return shares.index_select(0, rows)

    def training_taps(self, batch: Batch) -> Tensor:
        """(B, T, L, D) taps for training, possibly with noise."""
        return batch.taps

    def losses(self, hidden: Tensor, truth: Tensor) -> Mapping[str, Tensor]:
        """Auxiliary losses, (M,) each; `truth` (M, D) is the input of the target's head."""
        del hidden, truth
        return {}

    # -- training ----------------------------------------------------------------------------

    def checkpoint_gradients(self) -> None:
        """See `optional.CheckpointsGradients`."""
        self.checkpointing = True

    def attend_with(self, attend: Attend) -> None:
        """See `optional.Attends`."""
        self.attend = attend

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Compute queries only at supervised anchors; other positions give the first step keys and values."""
        index = AnchorIndex(batch.loss_mask, self.depth, self.anchors if self.training else 0, batch.seed)
        if not index.anchors:
            return
        layers = LayerUnroll(
            self.stack,
            self.qkv_weights(),
            self.rotary,
            index,
            batch.tokens.device,
            self.checkpointing,
            self.attend,
        )
        places, dtype = layers.places, next(self.parameters()).dtype
        feature = self.fuse(
            self.training_taps(batch).flatten(0, 1).index_select(0, places).to(dtype)
        )  # (N, D)
        # Depth d at anchor t reads token t + d; `places` has t + d - 1, an anchor of depth 1.
        tokens = batch.tokens.flatten()[places + 1]
        active, projections = self, self.token_projection(target.embed(tokens).to(dtype))
        token_positions = places % batch.tokens.shape[1]
        head, last = self.head(target), batch.last.flatten(0, 1)
        for depth, anchors in enumerate(index.anchors, 1):
            projection, positions = projections, token_positions
            if depth > 1:
                if (module := self.module_at(depth)) is not active:
                    active, projections = module, module.token_projection(target.embed(tokens).to(dtype))
                    layers.switch_layers(active.stack, active.qkv_weights(), self.detach_text)
                if (surviving := layers.surviving_rows(depth)) is not None:
                    feature = feature.index_select(0, surviving)
                # Anchor t enters step `depth` with the token at t + depth.
                slots = layers.slots(depth)
                projection, positions = (
                    active.drafted_projection(projections, slots + (depth - 1)),
                    token_positions[slots] + (depth - 1),
                )
            hidden, feature = self.emit(
                layers.step(depth, active.first_input(projection, feature), positions)
            )
            place = layers.anchors(depth)
            losses = self.losses(hidden, last.index_select(0, place + depth))
            weight = 1.0 if depth == 1 else index.share * self.depth_weight ** (depth - 1)
            yield DraftStep(hidden, anchors, depth, head, losses, weight, copied=place)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> RecurrentState:
        return RecurrentState(TextStore(self.stack, rows))

    @override
    def advance(
        self,
        state: RecurrentState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        end = RowInts.of(counts).on(tokens.device)[:, None] - 1  # (B, 1)
        # Pair i needs token i + 1; for the last pair of each row that is the root.
        following = tokens.roll(-1, 1).scatter(1, end, root[:, None])
        outputs, enter = [], self.input_maker(target)
        for start in range(0, tokens.shape[1], target.chunk):
            stop = min(start + target.chunk, tokens.shape[1])
            step = torch.arange(stop, device=tokens.device)
            block = 1 if stop == 1 else (step[start:, None] >= step)[None]  # (1, n, start + n)
            feature = self.fuse(taps[:, start:stop])
            first = enter(following[:, start:stop], feature)
            outputs.append(self.run_layers(state.store, first, block, step[start:]))
        x = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        state.store.keep(counts)
        state.newest = x.gather(1, end[..., None].expand(-1, -1, x.shape[-1]))

    def kv_bytes_per_token(self, state: RecurrentState) -> int:
        """See `optional.HasKeyCache`."""
        return state.store.bytes_per_token

    def input_maker(self, target: Target) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Function: (B, n) tokens, (B, n, D) features -> first residual and its q, k, v."""
        if not self.training and (by_lookup := self.pair_by_lookup(target)) is not None:
            return by_lookup
        return lambda tokens, feature: self.pair(target.embed(tokens).to(feature.dtype), feature)

    def run_layers(
        self, store: TextStore, first: tuple[Tensor, Tensor], block: Tensor | int, offsets: Tensor | int
    ) -> Tensor:
        """`run_after` on the first layer's residual (B, n, D) and q, k, v (B, n, P) -> (B, n, D)."""
        x, qkv = first
        return run_after(store, self.stack, self.rotary, x, block, offsets, qkv)

    @override
    def propose(
        self, state: RecurrentState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.newest is not None
        head = self.head(target)
        hidden, feature = self.emit(state.newest)  # (B, W, D) of the last level, W = 1 at first
        # Scratch slots that each node of the last level sees: (B, W, m) mask, or m for a chain.
        reach: Tensor | int = 0
        depth, active, enter = 1, self, self.input_maker(target)

        # Levels are written to scratch slots after the settled pairs; the next round overwrites them.
        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal depth, hidden, feature, reach, active, enter
            depth += 1
            if (module := self.module_at(depth)) is not active:
                active, enter = module, module.input_maker(target)
            if isinstance(reach, int) and token.shape[1] == 1:
                reach, parent_feature = reach + 1, feature
            else:
                if isinstance(reach, int):
                    reach = torch.ones(len(token), 1, reach, dtype=torch.bool, device=token.device)
                reach = tree_visibility(reach, parent)
                parent_feature = feature.gather(1, parent[..., None].expand(-1, -1, feature.shape[-1]))
            x = active.run_layers(state.store, enter(token, parent_feature), reach, depth - 2)
            hidden, feature = self.emit(x)
            return head(hidden)

        vocabulary, confidence = Vocabulary.of(head, target), self.confidence_of(lambda: hidden)
        return expand(head(hidden)[:, 0], step, sampler, coin, plan, vocabulary, confidence)

"""Block diffusion drafters: one pass over masks, given the target's features (DFlash, arXiv:2602.06036)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.attention import fast_dtype
from decode.model.head import Head
from decode.model.target import Tap, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Batch, DraftStep
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.families.token_bias_drafter import TokenBiasDrafter
from drafters.layers.block_rows import BlockRows
from drafters.layers.decode_step import run_after
from drafters.layers.decoder_layer import DecoderLayer, LayerShape, RMSNorm, Rotary
from drafters.layers.text_store import TextStore
from drafters.layers.token_bias import TeacherForcedBias
from drafters.layers.unroll import finish_layer
from drafters.layers.unroll_attention import Attend, attend_unrolled
from drafters.vocabulary import Vocabulary

MAX_COUNT = 1024  # layers, masks or passes; bounds what a downloaded config may ask for


@dataclass(slots=True)
class BlockState:
    """Keys and values of the settled features, the newest feature, and the root."""

    store: TextStore
    newest: Tensor | None = None  # (B, D)
    root: Tensor | None = None  # (B,)


class _Context(NamedTuple):
    """The fused features of a batch, texts concatenated.

    Attributes:
        feature: (N, D).
        table: rotary angles by position.
        rows: where they are.
    """

    feature: Tensor
    table: Tensor
    rows: BlockRows


class BlockDrafter(TokenBiasDrafter):
    """Base of drafters that predict a block of tokens in one pass: the root, followed by masks.

    Mask k predicts the k-th token after the root; with `root_predicts`, the root predicts the first and
    mask k the next one. Attention within a block is bidirectional or causal. In every layer a block also
    attends to the target's fused features before the root. The target's embedding and head are shared and
    frozen. Subclasses define how taps are fused and the input of a block.

    Args:
        vocab_size: V of the target.
        taps: layer ids (inputs of decoder layers) or "last".
        layers: number of decoder layers.
        depth: K, the maximum draft length; shorter drafts use a block's first predictions.
        anchors: blocks per text in a training batch, on average, sampled for each batch; 0: all.
        steps: denoising passes over a block; after each the most confident masks are filled in. With more
            than one, tokens cannot be sampled: no row is the distribution of its token. Training then
            reads each block twice, once with some masks filled in from the text.
        token_info: `none`, or a kind of `TokenInfoBias`.
        info_rank: rank of the bias.
        hot_tokens: vocabulary of the bias.
        qk_norm: see `DecoderLayer`.
        causal: whether attention within a block is causal.
        draft_vocab_size: see `Drafter`.
        **sizes: of `LayerShape`.

    Attributes:
        mask: (K, D) embeddings of the masks, or (1, D) if all are the same.
        root_predicts: whether the root's state predicts a token, so that a block has K - 1 masks.
        root_first: whether the first layer computes only the root. Its state predicts the first token and is
            added to the masks for the other layers. The first token is trained at all places of a text, the
            others at sampled ones; the token bias acts only on the others.
        detach: with `root_first`, whether masks pass no gradient to the computation of the root.
        checkpointing: whether the backward pass recomputes activations of MLPs.
        attend: computes attention in training.

    Raises:
        UserError: a number out of range.
    """

    mask: Tensor
    root_predicts = False
    root_first = False
    detach = True
    checkpointing = False
    attend: Attend = staticmethod(attend_unrolled)

    def __init__(
        self,
        vocab_size: int,
        taps: Sequence[Tap],
        layers: int,
        depth: int,
        anchors: int,
        steps: int = 1,
        token_info: str = "none",
        info_rank: int = 0,
        hot_tokens: int = 0,
        qk_norm: bool = False,
        causal: bool = False,
        draft_vocab_size: int | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(draft_vocab_size)
        for name, number in (("layers", layers), ("depth", depth), ("steps", steps)):
            if not 1 <= number <= MAX_COUNT:
                raise UserError(f"drafter.{name}={number} must be from 1 to {MAX_COUNT}")
        if self.root_first and layers == 1 and depth > 1:
            raise UserError(
                "drafter.layers=1: the first layer drafts one token; give 2, or set drafter.depth=1"
            )
        if anchors < 0 or not taps:
            raise UserError(
                f"drafter: anchors={anchors} must be at least 0, and taps={list(taps)} one or more"
            )
        self.taps, self.depth = tuple(taps), depth
        self.anchors, self.steps, self.causal = anchors, steps, causal
        if steps > 1:
            self.traits = replace(self.traits, proposals=("fixed",))
        self.shape = shape = LayerShape(**sizes)
        hidden_size, eps = shape.hidden_size, shape.eps
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.rope)
        self.fc = Linear(len(taps) * hidden_size, hidden_size, bias=False)
        self.context_norm = RMSNorm(hidden_size, eps=eps)
        self.layers = nn.ModuleList(DecoderLayer(shape, qk_norm=qk_norm) for _ in range(layers))
        self.norm = RMSNorm(hidden_size, eps=eps)
        self.add_token_bias(token_info, hidden_size, vocab_size, info_rank, hot_tokens)

    @property
    def masks(self) -> int:
        """Number of masks in a block."""
        return self.depth - self.root_predicts

    @property
    def stack(self) -> Sequence[DecoderLayer]:
        """The decoder layers."""
        return list(self.layers)  # pyright: ignore[reportReturnType]

    @abstractmethod
    def fuse(self, taps: Tensor, following: Tensor) -> Tensor:
        """(..., L, D) taps and (..., D) embeddings of the next tokens -> (..., D) features."""

    def places(self, root: Tensor) -> Tensor:
        """(..., D) embedded roots -> (..., 1 + masks, D) roots followed by masks."""
        masks = self.mask.expand(*root.shape[:-1], self.masks, -1)
        return torch.cat([root[..., None, :], masks], -2)

    def visible_places(self, device: torch.device) -> Tensor:
        """(1 + masks, 1 + masks) bool: places of a block that each sees; a window limits both sides."""
        step = torch.arange(1 + self.masks, device=device)
        apart = step[:, None] - step
        seen = apart >= 0 if self.causal else torch.ones_like(apart, dtype=torch.bool)
        return seen if self.shape.window is None else seen & (apart.abs() < self.shape.window)

    def zero_layer_outputs(self) -> None:
        """Initialise the output projections of all layers to 0, so that they are the identity."""
        for layer in self.stack:
            layer.o_proj.weight.zero_()
            layer.down_proj.weight.zero_()

    @abstractmethod
    def inputs(self, root: Tensor, newest: Tensor) -> Tensor:
        """(..., D) embedded roots and newest features -> (..., 1 + masks, D) input of the blocks."""

    def context(self, layer: DecoderLayer, feature: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (..., kv_heads, dim) from (..., D) features; no queries are computed."""
        _, k, v = layer.split(F.linear(feature, layer.qkv_proj.weight[layer.queries :]), angles)
        return k, v

    @property
    @override
    def state_size(self) -> int | None:
        return super().state_size if self.steps == 1 else None

    def head(self, target: Target) -> Head:
        """The target's head over the draft vocabulary, with the token bias if there is one."""
        return self.biased_head(target.head)

    @property
    @override
    def max_depth(self) -> int:
        """Number of predictions of a block."""
        return self.depth

    # -- training ----------------------------------------------------------------------------

    def checkpoint_gradients(self) -> None:
        """See `optional.CheckpointsGradients`."""
        self.checkpointing = True

    def attend_with(self, attend: Attend) -> None:
        """See `optional.Attends`."""
        self.attend = attend

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Run the blocks of all sampled anchors at once, then yield their supervised rows by depth."""
        several = self.training and self.steps > 1
        rows = BlockRows(
            batch.loss_mask,
            self.depth,
            self.visible_places(torch.device("cpu")),
            self.shape,
            batch.tokens.device,
            sample=self.anchors if self.training else 0,
            seed=batch.seed,
            root_everywhere=self.root_first,
            fill=several,
        )
        if not rows.anchors:
            return
        context, blocks, rooted = self._rooted(batch, target, rows)
        passes: list[tuple[Sequence[Tensor], Tensor | None]] = [(self._states(blocks, context), None)]
        if several:
            assert rows.filled is not None
            assert rows.counts is not None
            token = self._following(batch, target, rows)
            filled = self.fill_in(blocks, rows.filled, token.to(blocks.dtype))
            passes.append((self._states(filled, context), rows.counts[:, None] * ~rows.filled))
        if self.root_first:  # the same in all passes, and at every place of the text
            yield DraftStep(rooted, rows.roots_host, 1, self.output_head(target.head), {}, copied=rows.roots)
        teaching, head = [TeacherForcedBias(self.info, batch.tokens) for _ in passes], self.head(target)
        weight = rows.share / len(passes)
        for depth, (anchor, place) in enumerate(zip(rows.anchors, rows.places, strict=True), 1):
            at = rows.chosen[place]
            for bias, (states, counted) in zip(teaching, passes, strict=True):
                # Also at depth 1 that was yielded above: a bias with a memory reads all tokens.
                hidden = bias.with_bias_input(states[depth - 1][place], at, depth)
                if depth == 1 and self.root_first:
                    continue
                weights = weight if counted is None else weight * counted[place, depth - 1]
                yield DraftStep(hidden, anchor, depth, head, {}, weights, counted is not None, at)

    def _rooted(self, batch: Batch, target: Target, rows: BlockRows) -> tuple[_Context, Tensor, Tensor]:
        """Features, the (A, 1 + masks, D) input of the blocks, and with `root_first` the (R, D) roots."""
        tokens, dtype = batch.tokens.flatten(), self.mask.dtype
        behind = target.embed(tokens[rows.texts + 1]).to(dtype)  # no anchor is a text's last token
        feature = self.fuse(batch.taps.flatten(0, 1)[rows.texts].to(dtype), behind)
        table = self.rotary.table(batch.tokens.shape[1] + self.masks + 1, feature)
        context = _Context(feature, table, rows)
        root = target.embed(tokens[rows.roots + 1]).to(dtype)
        blocks = self.inputs(root, feature[rows.root_slots])  # (R, 1 + masks, D)
        rooted = blocks[:, 0]
        if self.root_first:
            rooted = self._run(self.stack[:1], blocks[:, :1], "roots", context)[:, 0]
            blocks = torch.cat([rooted[:, None], blocks[:, 1:]], 1)
            rooted = self.norm(rooted)
        return context, blocks if rows.blocks is None else blocks[rows.blocks], rooted

    def _states(self, blocks: Tensor, context: _Context) -> Sequence[Tensor]:
        """(A, 1 + masks, D) input of blocks -> final states by depth, (A, D) each."""
        if not self.root_first:
            states = list(self.norm(self._run(self.stack, blocks, "blocks", context)).unbind(1))
        else:
            states = [self.norm(blocks[:, 0])]
            if self.masks:
                if self.detach:
                    blocks = torch.cat([blocks[:, :1].detach(), blocks[:, 1:]], 1)
                    context = context._replace(feature=context.feature.detach())
                blocks = self._run(self.stack[1:], self.behind_root(blocks), "blocks", context)
                states += self.norm(blocks[:, 1:]).unbind(1)
        return states[1 + self.masks - self.depth :]

    def _following(self, batch: Batch, target: Target, rows: BlockRows) -> Tensor:
        """(A, masks, D) embeddings of the tokens that the masks stand for."""
        ahead = torch.arange(2, self.masks + 2, device=batch.tokens.device)
        following = (rows.chosen[:, None] + ahead).clamp_max(batch.tokens.numel() - 1)
        return target.embed(batch.tokens.flatten()[following])

    def behind_root(self, blocks: Tensor) -> Tensor:
        """Add the root's state to the masks of (B, 1 + masks, D) blocks."""
        return torch.cat([blocks[:, :1], blocks[:, 1:] + blocks[:, :1]], 1)

    def _run(self, layers: Sequence[DecoderLayer], x: Tensor, queries: str, context: _Context) -> Tensor:
        """Run layers over the first n places of A blocks, `queries` of `BlockRows.visibility`."""
        count, width = x.shape[:2]
        feature, table, rows = context
        ahead = torch.arange(1, width + 1, device=feature.device)
        angles = table[(rows.positions[rows.slots_of(queries), None] + ahead).flatten()]
        context_angles, visible = table[rows.positions], rows.visibility(queries)
        x = x.flatten(0, 1)  # (M, D)
        for layer in layers:
            k, v = self.context(layer, feature, context_angles)
            q, block_k, block_v = layer.split(layer.qkv_proj(layer.input_layernorm(x)), angles)
            # `attend_unrolled` treats a block's positions as later steps of an unroll.
            keys = [k, *block_k.unflatten(0, (count, width)).unbind(1)]
            values = [v, *block_v.unflatten(0, (count, width)).unbind(1)]
            attended = self.attend(q, keys, values, visible).flatten(1)
            x = finish_layer(layer, x, attended, self.checkpointing)
        return x.unflatten(0, (count, width))

    def fill_in(self, x: Tensor, filled: Tensor, token: Tensor) -> Tensor:
        """Replace masks by tokens in the (B, 1 + masks, D) input of blocks.

        Args:
            x: input of blocks.
            filled: (B, K) bool; with `root_predicts` the last column is ignored.
            token: (B, K, D) or (B, masks, D) embedded tokens.
        """
        filled, token = filled[:, : self.masks], token[:, : self.masks]
        masks = x[:, 1:] + torch.where(filled[..., None], token - self.mask, 0.0)
        return torch.cat([x[:, :1], masks], 1)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> BlockState:
        return BlockState(TextStore(self.stack, rows))

    @override
    def advance(
        self,
        state: BlockState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        store, device = state.store, taps.device
        end = RowInts.of(counts).on(device) - 1
        following = tokens.roll(-1, 1).scatter(1, end[:, None], root[:, None])
        feature = self.fuse(taps, target.embed(following).to(taps.dtype))
        store.begin(taps.shape[1])
        dtype = fast_dtype(feature)
        positions = store.read.on(device)[:, None] + torch.arange(taps.shape[1], device=device)
        angles = self.rotary.table(store.longest, feature)[positions]
        for i, layer in enumerate(self.stack):
            store.write(i, *(t.transpose(1, 2).to(dtype) for t in self.context(layer, feature, angles)))
        store.keep(counts)
        state.newest = feature[torch.arange(len(end), device=device), end]
        state.root = root

    def kv_bytes_per_token(self, state: BlockState) -> int:
        """See `optional.HasKeyCache`."""
        return state.store.bytes_per_token

    @override
    def propose(
        self, state: BlockState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.root is not None
        assert state.newest is not None
        self.check(plan)
        logits, states = self._denoise(state, target)
        head = self.output_head(target.head)
        raw, vocabulary = logits[:, : plan.depth].unbind(1), Vocabulary.of(head, target)
        levels = ParallelLogits(raw, states, head, self.info, state.root, vocabulary, 1 + self.root_first)
        return self.expand_levels(levels, sampler, coin, plan)

    def _denoise(self, state: BlockState, target: Target) -> tuple[Tensor, Tensor]:
        """(B, K, V) logits and (B, K, D) states of the masks; filled masks keep theirs."""
        assert state.root is not None
        assert state.newest is not None
        x = self.inputs(target.embed(state.root).to(state.newest.dtype), state.newest)
        states = self._pass(state.store, x)
        head = self.output_head(target.head)
        logits, vocabulary = head.product(states), Vocabulary.of(head, target)
        filled = torch.zeros_like(logits[..., 0], dtype=torch.bool)  # (B, K)
        for _ in range(self.steps - 1):
            levels = ParallelLogits(
                logits.unbind(1), states, head, self.info, state.root, vocabulary, 1 + self.root_first
            )
            token, confidence = levels.likeliest()
            # With `root_predicts` there is no mask after the last token to fill in.
            open_places = confidence.masked_fill(filled, -1.0)[:, : self.masks]
            surest = open_places.topk(min(-(-self.depth // self.steps), self.masks), -1)
            new = torch.zeros_like(filled).scatter_(1, surest.indices, surest.values > 0)
            x, filled = self.fill_in(x, new, target.embed(token).to(x.dtype)), filled | new
            fresh = self._pass(state.store, x)
            states = torch.where(filled[..., None], states, fresh)
            logits = torch.where(filled[..., None], logits, head.product(fresh))
        return logits, states

    def _pass(self, store: TextStore, x: Tensor) -> Tensor:
        """(B, 1 + masks, D) input of blocks -> (B, K, D) states that predict; the cache is not extended."""
        rows, width = x.shape[:2]
        block = self.visible_places(x.device).expand(rows, -1, -1)
        places = torch.arange(width, device=x.device)
        if not self.root_first:
            x = run_after(store, self.stack, self.rotary, x, block, places)
        else:
            root = run_after(store, self.stack[:1], self.rotary, x[:, :1], 1, 0)
            x = self.behind_root(torch.cat([root, x[:, 1:]], 1))
            if self.masks:
                x = run_after(store, self.stack[1:], self.rotary, x, block, places, first=1)
            x = torch.cat([root, x[:, 1:]], 1)
        return self.norm(x)[:, width - self.depth :]

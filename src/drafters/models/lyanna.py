"""Lyanna (Chen et al., arXiv:2602.21224): autoregression over hidden states without token inputs.

There is no public code or full recipe; docs/drafters/lyanna.md separates the paper's choices from ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.head import Head
from decode.model.target import LAST, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Batch, DraftStep, constructor_arguments
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.drafting.state_reuse import Reuse, resized
from drafters.families.recurrent import RecurrentDrafter, RecurrentState, add_feature_noise
from drafters.families.token_bias_drafter import TokenBiasDrafter
from drafters.layers.decoder_layer import DecoderLayer, LayerShape, Rotary
from drafters.layers.text_store import TextStore
from drafters.layers.token_bias import TeacherForcedBias
from drafters.layers.unroll import FirstLayerInput
from drafters.vocabulary import Vocabulary


@dataclass(slots=True)
class LyannaState(RecurrentState):
    """A `RecurrentState` with the states of the latest draft, for reuse after a rejection."""

    root: Tensor | None = None  # (B,)
    drafted: Tensor | None = None  # (B, K, D) states of the latest draft
    stale: Tensor | None = None  # (B, K, D) states of the previous draft, shifted to their current depth
    left: Tensor | None = None  # (B,) number of valid stale states


class Lyanna(TokenBiasDrafter, RecurrentDrafter):
    """Lyanna: s_0 is the feature f_t, and s_k = layer(W s_{k-1}) predicts f_{t+k}.

    The logits of depth k are the target's head on s_k plus a low-rank bias of the previous token. No drafted
    token enters a state, so one head product serves all K depths. After a accepted tokens s_{a+2} .. s_K stay
    valid: they predict tokens after the new root.

    Args:
        vocab_size: V of the target.
        layers: number of decoder layers.
        depth: depths unrolled in training.
        anchors: places per text trained at depth 2 and deeper, on average; 0: all.
        root_token: `none`; or `add`: settled tokens enter with the feature before them (not in the
            paper), and the bias acts from depth 2. Drafted tokens never enter.
        drafted_states: `shared`: W and layers of the settled places, as in the paper; or `own`: separate ones
            for s_2, s_3, ..., with gradients that stop at the previous state and at settled keys and values.
        token_info: `none`, or a kind of `TokenInfoBias`.
        info_rank: rank of the bias.
        hot_tokens: vocabulary of the bias.
        feature_noise: half-width of the uniform noise on training features, scaled by 512 / T.
        feature_weight: weight of the Smooth-L1 regression of states; the divergence has weight 1.
        base_weight: initial weight of the divergence without the bias; decays to 0 over the run.
        warmup: share of the steps with weight 1 for the regression and 0.1 for each divergence.
        reuse: arguments of `Reuse`.
        draft_vocab_size: see `Drafter`.
        **sizes: of `LayerShape`.

    Attributes:
        detach: see `drafted_states`.
        biased_from: the first depth with the bias.
        later: W and layers of s_2, s_3, ... with `drafted_states=own`.

    Raises:
        UserError: an option out of range.
    """

    taps = (LAST,)
    detach = True

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        depth: int,
        anchors: int,
        root_token: str,
        drafted_states: str,
        token_info: str,
        info_rank: int,
        hot_tokens: int,
        feature_noise: float,
        feature_weight: float,
        base_weight: float,
        warmup: float,
        reuse: dict[str, Any],
        draft_vocab_size: int | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(draft_vocab_size)
        self.settings = constructor_arguments(locals())
        self.settings["reuse"] = dict(reuse)
        if root_token not in ("none", "add"):
            raise UserError(f"drafter.root_token={root_token}: choose none or add")
        if drafted_states not in ("shared", "own"):
            raise UserError(f"drafter.drafted_states={drafted_states}: choose shared or own")
        if layers < 1 or depth < 1 or anchors < 0:
            raise UserError(
                f"drafter: layers={layers}, depth={depth}, anchors={anchors}; at least 1, 1 and 0"
            )
        if not 0 <= warmup < 1:
            raise UserError(f"drafter.warmup={warmup}: must be from 0 to less than 1")
        self.depth, self.anchors, self.feature_noise, self.warmup = depth, anchors, feature_noise, warmup
        self.feature_weight, self.base_weight = feature_weight, base_weight
        self.reuse = Reuse(**reuse)
        # Old states are verified without new ones in all rows or in none.
        self.traits = replace(self.traits, depends_on_batch=self.reuse.mode == "immediate")
        add, shape = root_token == "add", LayerShape(**sizes)
        hidden_size = shape.hidden_size
        self.in_proj = Linear(hidden_size * (1 + add), hidden_size, bias=False)
        self.reads_tokens = add
        # Input instead of a token for drafted states, if W is shared
        self.no_token = nn.Parameter(torch.zeros(hidden_size)) if add and drafted_states == "shared" else None
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.rope)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(layers))
        self.add_token_bias(token_info, hidden_size, vocab_size, info_rank, hot_tokens)
        self.biased_from = 1 + add
        self.later: Lyanna | None = None
        if drafted_states == "own":
            plain: dict[str, Any] = {"root_token": "none", "drafted_states": "shared", "token_info": "none"}
            self.later = Lyanna(**{**self.settings, **plain, "draft_vocab_size": None})

    @override
    @classmethod
    @torch.no_grad()
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Initialise to predict the current feature as the next one."""
        sizes: dict[str, Any] = asdict(LayerShape.of(target)) | {"vocab_size": target.vocab_size}
        drafter, size = cls(**sizes | options), target.hidden_size
        for states in (drafter, drafter.module_at(2)):
            for layer in states.stack:
                layer.o_proj.weight.zero_()
                layer.down_proj.weight.zero_()
            states.in_proj.weight.normal_(std=0.32 * size**-0.5)
            states.in_proj.weight[:, -size:] += torch.eye(size)
        return drafter

    @override
    def module_at(self, depth: int) -> Lyanna:
        return self if depth == 1 or self.later is None else self.later

    @property
    def detach_text(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether gradients of drafted states stop at settled keys and values."""
        return self.detach and self.later is not None

    def depends_on_rounds(self, plan: Plan) -> bool:
        """Whether a draft depends on where the previous round began."""
        return self.reuse.applies_to(plan)

    def remark(self, plan: Plan) -> str:
        """See `optional.Remarks`."""
        mode = self.reuse.mode
        if mode == "none" or not plan.depth or self.reuse.applies_to(plan):
            return ""
        return (
            f"drafter.reuse.mode={mode}: states are not reused by {plan.name}; it needs fixed nodes in a "
            "dynamic tree (decode=dynamic decode.proposal=fixed), or drafter.reuse.drawn=true for hybrid ones"
        )

    @property
    @override
    def stack(self) -> Sequence[DecoderLayer]:
        return list(self.layers)  # pyright: ignore[reportReturnType]

    @override
    def fuse(self, taps: Tensor) -> Tensor:
        return taps[..., 0, :]

    @override
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        x = self.in_proj(torch.cat([embedded, feature], -1) if self.reads_tokens else feature)
        layer = self.stack[0]
        return x, layer.qkv_proj(layer.input_layernorm(x))

    @override
    def token_projection(self, embedded: Tensor) -> Tensor:
        if not self.reads_tokens:
            return embedded[:, :0]
        return F.linear(embedded, self.in_proj.weight[:, : embedded.shape[-1]])

    @override
    def drafted_projection(self, shares: Tensor, rows: Tensor) -> Tensor:
        if self.no_token is None:
            return shares[: len(rows)]
        return self.token_projection(self.no_token[None]).expand(len(rows), -1)

    @override
    def first_input(self, share: Tensor, feature: Tensor) -> FirstLayerInput:
        size = feature.shape[-1]
        x = F.linear(feature, self.in_proj.weight[:, -size:])
        x = x + share if self.reads_tokens else x
        return FirstLayerInput(x, self.stack[0].input_layernorm(x), None)

    @override
    def first_weight(self) -> Tensor:
        return self.stack[0].qkv_proj.weight

    @override
    def emit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.detach() if self.detach_text else x

    @override
    def head(self, target: Target) -> Head:
        return self.biased_head(target.head)

    # -- training ----------------------------------------------------------------------------

    @override
    def training_taps(self, batch: Batch) -> Tensor:
        return add_feature_noise(batch, self.feature_noise) if self.training else batch.taps

    @override
    def losses(self, hidden: Tensor, truth: Tensor) -> Mapping[str, Tensor]:
        return {"feature": F.smooth_l1_loss(hidden, truth.to(hidden.dtype), reduction="none").mean(-1)}

    def _schedule(self, progress: float) -> tuple[float, float, float]:
        """Weights of the divergence, the regression, and the divergence without the bias."""
        if progress < self.warmup:
            return 0.1, 1.0, min(0.1, self.base_weight)
        return 1.0, self.feature_weight, self.base_weight * (1 - progress) / (1 - self.warmup)

    @override
    def aux_weights_at(self, progress: float) -> Mapping[str, float]:
        divergence, feature, _ = self._schedule(progress)
        return {"feature": feature / divergence}  # `DraftStep.weight` scales both

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Yield each depth with the bias and, while `base_weight` is not 0, again without it."""
        divergence, _, base = self._schedule(batch.progress)
        teaching = TeacherForcedBias(self.info, batch.tokens)
        for step in super().unroll(batch, target):
            # At every depth, since a bias with a memory reads all tokens.
            hidden = teaching.with_bias_input(step.hidden, step.place, step.depth)
            unbiased = step._replace(head=self.output_head(target.head))
            if step.depth < self.biased_from:
                yield unbiased._replace(weight=divergence * step.weight)
                continue
            yield step._replace(hidden=hidden, weight=divergence * step.weight)
            if base and self.info is not None:
                yield unbiased._replace(aux={}, weight=base * step.weight, training_only=True)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> LyannaState:
        return LyannaState(TextStore(self.stack, rows))

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
        assert isinstance(state, LyannaState)
        super().advance(state, target, tokens, taps, counts, root)
        state.root, state.stale, drafted, state.drafted = root, None, state.drafted, None
        if drafted is None or self.reuse.mode == "none":
            return
        # With a accepted tokens, the new root is at depth a + 1 = counts of the previous draft.
        depth, num_settled = drafted.shape[1], RowInts.of(counts).on(root.device)
        index = torch.arange(depth, device=root.device) + num_settled[:, None]  # (B, K)
        index = index.clamp_max(depth - 1)[..., None].expand(-1, -1, drafted.shape[-1])
        state.stale, state.left = drafted.gather(1, index), (depth - num_settled).clamp_min(0)

    @override
    def append(self, state: RecurrentState, target: Target, other: RecurrentState) -> None:
        assert isinstance(state, LyannaState)
        assert isinstance(other, LyannaState)
        for one, neighbour in ((state, other), (other, state)):
            if one.stale is None and one.root is not None and neighbour.stale is not None:
                one.stale = neighbour.stale.new_zeros(len(one.root), *neighbour.stale.shape[1:])
                one.left = torch.zeros_like(one.root)  # none are valid
        super().append(state, target, other)

    @override
    def propose(
        self, state: RecurrentState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert isinstance(state, LyannaState)
        assert state.root is not None
        self.check(plan)
        root, left, mode = state.root, state.left, self.reuse.mode
        head = self.output_head(target.head)
        vocabulary = Vocabulary.of(head, target)

        def levels(raw: Sequence[Tensor], states: Tensor) -> ParallelLogits:
            roots = root.repeat(len(states) // len(root))
            return ParallelLogits(raw, states, head, self.info, roots, vocabulary, self.biased_from)

        stale = state.stale if self.reuse.applies_to(plan) else None
        if stale is not None and left is not None:
            stale = resized(stale, plan.depth)
            if mode == "immediate":
                raw = self._add_root_bias(head.product(stale).unbind(1), stale, root)
                if self.reuse.is_sufficient(head.shape(torch.stack(raw, 1)), left):
                    state.drafted = None  # reused only once
                    return self.expand_levels(levels(raw, stale), sampler, coin, plan, left)
        states = state.drafted = self._states(state, plan.depth)
        if stale is None or left is None or mode == "immediate":
            raw = head.product(states).unbind(1)
            return self.expand_levels(levels(raw, states), sampler, coin, plan)
        both = torch.cat([states, stale])  # (2 B, K, D)
        raw = self._add_root_bias(head.product(both).unbind(1), stale, root)  # K of (2 B, V)
        if mode == "logit_sum":
            return self.expand_levels(levels(self.reuse.summed(raw, left), states), sampler, coin, plan)
        if plan.proposal_temperature(sampler.temperature) is None:  # both trees have fixed nodes
            return self.reuse.merged(levels(raw, both), left, coin, plan)
        new, old = zip(*(logits.chunk(2) for logits in raw), strict=True)
        fresh = self.expand_levels(levels(new, states), sampler, coin, plan)
        return self.reuse.merged_with_drawn(fresh, levels(old, stale), left, coin, plan)

    def _add_root_bias(self, raw: Sequence[Tensor], stale: Tensor, root: Tensor) -> list[Tensor]:
        """Add the root's bias to the first logits of old states, the last rows, with `root_token=add`.

        New states of depth 1 contain the root; old ones were drafted before the root was known.
        """
        if self.info is None or self.biased_from == 1:
            return list(raw)
        fresh, old = raw[0].tensor_split([len(raw[0]) - len(stale)])
        biased, _ = self.info.add(old[:, None], root[:, None], stale[:, :1], None)
        return [torch.cat([fresh, biased[:, 0]]), *raw[1:]]

    def _states(self, state: LyannaState, depth: int) -> Tensor:
        """(B, K, D) states, computed sequentially; keys and values stay in scratch slots."""
        assert state.newest is not None
        _, newest = self.emit(state.newest)  # (B, 1, D)
        states, module = [newest], self.module_at(2)
        token_input = newest.new_zeros(1) if module.no_token is None else module.no_token
        token_input = token_input.expand(len(newest), 1, -1)
        for k in range(1, depth):
            x = module.run_layers(state.store, module.pair(token_input, states[-1]), k, k - 1)
            states.append(self.emit(x)[1])
        return torch.cat(states, 1)

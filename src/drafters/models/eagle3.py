"""EAGLE-3 (Li et al., arXiv:2503.01840): low, middle and high features of the target, and its own head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.head import Head
from decode.model.target import LAST, Tap, Target
from drafters.base import ParamGroup, constructor_arguments
from drafters.families.recurrent import RecurrentDrafter
from drafters.layers.decoder_layer import DecoderLayer, LayerShape, RMSNorm, Rotary
from drafters.layers.unroll import FirstLayerInput
from drafters.vocabulary import TokenCounts

MIN_LAYERS = 7  # fewer would give equal default taps
OWN_LOGIT = 12.0  # initial attention logit of a place to itself; others are 0 +- 1.5


class Eagle3(RecurrentDrafter):
    """EAGLE-3: taps are concatenated and projected to one feature (`fc`).

    The first layer's attention reads the feature and the token's embedding; at later depths the drafter's
    output replaces the feature. The target's embedding is shared and frozen, the head is trained.

    Args:
        vocab_size: V of the target.
        taps: layer ids (inputs of decoder layers) or "last".
        layers: number of decoder layers; only the first reads the embedding.
        depth: depths unrolled in training.
        anchors: places per text trained at depth 2 and deeper, on average; 0: all.
        depth_weight: see `RecurrentDrafter`.
        rate: its learning rate relative to the optimizer's.
        draft_vocab_size: V', size of the head's vocabulary, also in training.
        norm_before_residual: whether the first layer's residual is the normalised feature.
        norm_before_fc: whether the concatenated taps are normalised (gpt-oss).
        fc_norm: whether each tap is normalised separately (EAGLE 3.1).
        norm_output: whether the feature that is fed back has passed the final norm.
        qk_norm: see `DecoderLayer`; likewise `qkv_bias` and `o_bias`.
        **sizes: of `LayerShape`.

    Raises:
        UserError: no taps, no layers, an invalid vocabulary size, or both norms before `fc`.
    """

    def __init__(
        self,
        vocab_size: int,
        taps: Sequence[Tap],
        layers: int,
        depth: int,
        draft_vocab_size: int,
        norm_before_residual: bool,
        norm_before_fc: bool,
        fc_norm: bool,
        norm_output: bool,
        anchors: int = 0,  # defaults of imported checkpoints
        depth_weight: float = 1.0,
        rate: float = 1.0,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        o_bias: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__(draft_vocab_size if draft_vocab_size < vocab_size else None)
        self.settings = constructor_arguments(locals())
        self.settings["taps"] = list(taps)
        if not taps or layers < 1:
            raise UserError(f"drafter: taps={list(taps)} and layers={layers}; give at least one of each")
        if anchors < 0:
            raise UserError(f"drafter.anchors={anchors}: give at least 1, or 0 for all places")
        if not 0 < depth_weight <= 1:
            raise UserError(f"drafter.depth_weight={depth_weight}: give a number above 0 and up to 1")
        if not 0 < rate <= 1:
            raise UserError(f"drafter.rate={rate}: give a share of the learning rate, above 0 and up to 1")
        if not 1 <= draft_vocab_size <= vocab_size:
            raise UserError(
                f"drafter.draft_vocab_size={draft_vocab_size}: give at least 1, and no more than the "
                f"target's {vocab_size} tokens"
            )
        if norm_before_fc and fc_norm:
            raise UserError("drafter: norm_before_fc and fc_norm both normalise the taps; choose one")
        self.taps, self.depth, self.anchors = tuple(taps), depth, anchors
        self.depth_weight, self.rate = depth_weight, rate
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        shape = LayerShape(**sizes)
        hidden_size, eps = shape.hidden_size, shape.eps
        fused = len(taps) * hidden_size
        self.input_norm = RMSNorm(fused, eps=eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(hidden_size, eps=eps) for _ in taps) if fc_norm else None
        self.fc = Linear(fused, hidden_size, bias=False)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.rope)
        self.hidden_norm = RMSNorm(hidden_size, eps=eps)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, inputs=1 if i else 2, qk_norm=qk_norm, qkv_bias=qkv_bias, o_bias=o_bias)
            for i in range(layers)
        )
        self.norm = RMSNorm(hidden_size, eps=eps)
        self.lm_head = Linear(hidden_size, draft_vocab_size, bias=False)

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        options["taps"] = _resolve_taps(options["taps"], len(target.layers))
        size = options["draft_vocab_size"]  # None: the target's
        options["draft_vocab_size"] = target.vocab_size if size is None else min(size, target.vocab_size)
        sizes: dict[str, Any] = asdict(LayerShape.of(target)) | {"vocab_size": target.vocab_size}
        drafter = cls(**sizes | options)
        drafter._initialise(target)
        return drafter

    @torch.no_grad()
    def _initialise(self, target: Target) -> None:
        """Initialise the head from the target, `fc` to mostly the highest tap, and layers to the identity.

        Half of the attention heads attend to their own place.
        """
        for layer in self.stack:
            layer.o_proj.weight.zero_()
            layer.down_proj.weight.zero_()
        self._attend_to_own_token()
        size, highest = len(self.fc.weight), max(range(len(self.taps)), key=lambda i: _depth(self.taps[i]))
        self.fc.weight.normal_(std=0.32 * size**-0.5)
        self.fc.weight[:, highest * size : (highest + 1) * size] += torch.eye(size)
        if self.d2t is None:
            self.lm_head.weight.copy_(target.head.weight * target.head.scale)

    def _attend_to_own_token(self) -> None:
        """Make half of the heads attend to their own place, by equal maps of the token to query and key.

        The token enters only through attention. With independent weights, attention is nearly the mean over
        the text and hides the place's own token. The other heads stay free to attend elsewhere, a pattern
        that saturated heads hardly learn.
        """
        first, size, own = self.stack[0], len(self.fc.weight), max(1, self.stack[0].heads // 2)
        group = first.heads // first.kv_heads  # query heads that share a key
        # The embedding is normalised, so its own logit is |W e|^2 / sqrt(dim) = dim std^2 D / sqrt(dim).
        std = (OWN_LOGIT / (first.head_dim**0.5 * size)) ** 0.5
        keys = std * torch.randn(-(-own // group), first.head_dim, size)
        queries = keys.repeat_interleave(group, 0)[:own]
        for begin, rows in ((0, queries), (first.queries, keys)):
            first.qkv_proj.weight[begin : begin + rows.shape[:2].numel(), :size] = rows.flatten(0, 1)

    @override
    @torch.no_grad()
    def choose_tokens(self, counts: TokenCounts, target: Target) -> str:
        assert self.d2t is not None
        line = super().choose_tokens(counts, target)
        rows = target.head.weight[self.d2t.to(target.device)] * target.head.scale
        self.lm_head.weight.copy_(rows)
        return line

    @override
    def resize_vocabulary(self, size: int) -> None:
        super().resize_vocabulary(size)
        weight = self.lm_head.weight
        self.lm_head = Linear(weight.shape[1], size, bias=False).to(weight)

    @override
    def param_groups(self) -> list[ParamGroup]:
        return [group._replace(rate=self._rate) for group in super().param_groups()]

    def _rate(self, progress: float) -> float:
        del progress
        return self.rate

    @property
    @override
    def stack(self) -> Sequence[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.layers))

    @override
    def fuse(self, taps: Tensor) -> Tensor:
        if self.fc_norm is not None:
            taps = torch.stack(
                [norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(-2), strict=True)], -2
            )
        x = taps.flatten(-2)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    @override
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        first, normed = self.stack[0], self.hidden_norm(feature)
        qkv = first.qkv_proj(torch.cat([first.input_layernorm(embedded), normed], -1))
        return normed if self.norm_before_residual else feature, qkv

    @override
    def pair_by_lookup(self, target: Target) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        first = self.stack[0]
        product, norm, rows = first.qkv_proj, first.input_layernorm, len(first.qkv_proj.weight)
        assert isinstance(norm, RMSNorm)
        weights = [w for w in (product.weight, product.bias, norm.weight) if w is not None]
        shares = self._shares.of(
            target, weights, rows, lambda embedded: (self.token_projection(embedded), self.first_weight())
        )
        if shares is None:
            return None

        def pair(tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            normed = self.hidden_norm(feature)
            return normed if self.norm_before_residual else feature, shares(tokens, normed)

        return pair

    @override
    def token_projection(self, embedded: Tensor) -> Tensor:
        # The embedding needs no gradient. Multiplying the norm's weight into the projection saves the
        # gradient of the normalised embedding too.
        norm, product, size = self.stack[0].input_layernorm, self.stack[0].qkv_proj, embedded.shape[-1]
        assert isinstance(norm, RMSNorm)
        unit = F.rms_norm(embedded, (size,), eps=norm.eps)
        return F.linear(unit, product.weight[:, :size] * norm.weight, product.bias)

    @override
    def first_input(self, share: Tensor, feature: Tensor) -> FirstLayerInput:
        normed = self.hidden_norm(feature)
        return FirstLayerInput(normed if self.norm_before_residual else feature, normed, share)

    @override
    def first_weight(self) -> Tensor:
        return self.stack[0].qkv_proj.weight[:, self.norm.weight.numel() :]

    @override
    def emit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        return hidden, hidden if self.norm_output else x

    @override
    def head(self, target: Target) -> Head:
        return Head(self.lm_head.weight, d2t=self.d2t)


def _depth(tap: Tap) -> float:
    return math.inf if tap == LAST else float(tap)


def _resolve_taps(taps: Sequence[Tap] | None, n: int) -> list[Tap]:
    """The configured taps; default: the paper's three for n layers: low, middle, high."""
    if taps is not None:
        return list(taps)
    if n < MIN_LAYERS:
        raise UserError(
            f"drafter.taps: the target has {n} layers, too few for the paper's low, middle and high one; "
            f"choose among 0..{n - 1} and last, as in drafter.taps={_suggest_taps(n)}; engines have no last"
        )
    return [2, n // 2, n - 3]


def _suggest_taps(n: int) -> str:
    """Up to three layers of a small target, as an option; not layer 0, which some engines cannot tap."""
    layers = {min(max(layer, 1), n - 1) for layer in (n // 2 - 1, n // 2, n - 1)}
    return f"[{','.join(map(str, sorted(layers)))}]"

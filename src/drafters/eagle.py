"""EAGLE-1 (Li et al., arXiv:2401.15077): autoregression over the target's last features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.cache import RowStore, attention_mask
from decode.coin import KeyedCoin
from decode.draft import Draft
from decode.plan import Plan
from decode.sampling import Sampler
from decode.target import LAST, Target
from drafters.base import Batch, Drafter, DraftStep, supervised
from drafters.expand import expand
from drafters.layers import DecoderLayer, Rotary, attend, attend_unrolled, descend


@dataclass(slots=True)
class EagleState:
    """Keys and values of the settled (feature, next token) pairs, and the newest prediction."""

    store: RowStore
    feature: Tensor | None = None  # (B, 1, D) predicted feature at the root


class Eagle(Drafter):
    """Pair i is (feature f_i, embedding of x_{i+1}); one decoder layer predicts f_{i+1} from it,
    and the target's own frozen head reads tokens off the prediction.

    Args:
        hidden_size: D of the target.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: of one head.
        intermediate_size: of the MLP.
        eps: of the RMS norm.
        rope_theta: base of the rotary wavelengths.
        depth: depths unrolled in training. 1 is the paper's recipe; more feeds the drafter its
            own features, as it will see them when it drafts (HASS, arXiv:2408.15766).
        feature_noise: half-width of the uniform noise on training features, scaled by 512 / T.
        feature_weight: of the Smooth-L1 feature regression, beside a divergence of weight 1.
    """

    taps = (LAST,)

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        eps: float,
        rope_theta: float,
        depth: int,
        feature_noise: float,
        feature_weight: float,
    ) -> None:
        super().__init__()
        self.settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.depth, self.feature_noise = depth, feature_noise
        self.aux_weights = {"feature": feature_weight}
        self.fc = nn.Linear(2 * hidden_size, hidden_size)
        self.rotary = Rotary(head_dim, rope_theta)
        self.layer = DecoderLayer(
            hidden_size, heads, kv_heads, head_dim, intermediate_size, eps, input_norm=False
        )
        self._initialise(hidden_size)

    @torch.no_grad()
    def _initialise(self, hidden_size: int) -> None:
        """Begin as "the next feature is this one, nudged by the token": the layer adds nothing yet."""
        self.layer.o_proj.weight.zero_()
        self.layer.down_proj.weight.zero_()
        self.fc.weight.normal_(std=0.02)
        self.fc.weight[:, hidden_size:] += torch.eye(hidden_size)
        self.fc.bias.zero_()

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        config = target.config
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        shape = {
            "hidden_size": target.hidden_size,
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // heads,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "eps": getattr(config, "rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta", 10_000.0),
        }
        return cls(**shape | options)

    def _pair(self, feature: Tensor, token: Tensor, target: Target) -> Tensor:
        """(B, n, D) features at i and (B, n) tokens at i + 1 -> (B, n, D)."""
        embedded = target.embed(token).to(feature.dtype)
        return self.fc(torch.cat([embedded, feature], -1))

    # -- training face -----------------------------------------------------------------------

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        feature = batch.taps[:, :, 0].to(self.fc.weight.dtype)  # (B, T, D)
        length, device = feature.shape[1], feature.device
        if self.training and self.feature_noise:
            generator = torch.Generator(device).manual_seed(batch.seed)
            noise = torch.rand(feature.shape, generator=generator, device=device) - 0.5
            feature = feature + noise * (2 * self.feature_noise * 512 / length)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(1, self.depth + 1):
            anchors = supervised(batch.loss_mask, depth)
            if not anchors.any():
                return
            # Anchor t enters step `depth` with the token at t + depth; rolled-in ones are unsupervised.
            token = batch.tokens.roll(-depth, 1)
            x = self._pair(feature, token, target)
            angles = self.rotary.table(length + self.depth, x)[depth - 1 : length + depth - 1]
            q, k, v = self.layer.project(x, angles)
            keys.append(k)
            values.append(v)
            attended = attend(q, k, v, causal=True) if depth == 1 else attend_unrolled(q, keys, values)
            feature = self.layer.finish(x, attended)
            anchor = anchors.flatten().nonzero()[:, 0]  # (M,)
            hidden = feature.flatten(0, 1)[anchor]
            truth = batch.last.flatten(0, 1)[anchor + depth].to(hidden.dtype)
            regression = F.smooth_l1_loss(hidden, truth, reduction="none").mean(-1)  # (M,)
            yield DraftStep(hidden, anchor, depth, target.head, {"feature": regression})

    # -- decoding face -----------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> EagleState:
        return EagleState(RowStore(layers=1, rows=rows, capacity=256))

    @override
    def advance(
        self,
        state: EagleState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        end = torch.tensor(counts).to(tokens.device)[:, None] - 1  # (B, 1)
        # Pair i needs the token after it; the last one's is the root.
        following = tokens.roll(-1, 1).scatter(1, end, root[:, None])
        x = self._pair(taps[:, :, 0], following, target)
        n = tokens.shape[1]
        step = torch.arange(n, device=tokens.device)
        block = (step[:, None] >= step)[None].expand(len(counts), -1, -1)
        feature = self._forward(state.store, x, block)
        state.store.keep(counts)
        state.feature = feature.gather(1, end[..., None].expand(-1, -1, feature.shape[-1]))

    @override
    def select(self, state: EagleState, rows: Sequence[int]) -> None:
        state.store.select(rows)
        if state.feature is not None:
            state.feature = state.feature[list(rows)]

    def _forward(self, store: RowStore, x: Tensor, block: Tensor) -> Tensor:
        """Run (B, n, D) inputs behind the settled pairs.

        `block` (B, n, m) says which of the m newest slots each input sees, itself included; the
        m - n before them are scratch of earlier calls.
        """
        scratch = block.shape[2] - x.shape[1]
        store.begin(x.shape[1], scratch)
        settled = torch.tensor(store.lengths).to(x.device)
        positions = settled[:, None] + block.sum(-1) - 1  # (B, n)
        q, k, v = self.layer.project(x, self.rotary.table(store.width, x)[positions])
        k, v = store.write(0, k, v)
        mask = attention_mask(store.lengths, block, store.width)
        return self.layer.finish(x, attend(q, k, v, mask))

    @override
    def propose(
        self, state: EagleState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        assert state.feature is not None
        feature = state.feature  # (B, 1, D), then (B, W, D): of the entries of the last call
        reach = torch.ones(feature.shape[0], 1, 0, dtype=torch.bool, device=feature.device)

        # Levels are written to scratch slots behind the settled pairs and never kept, so the
        # next round writes over them.
        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal feature, reach
            above = feature.gather(1, parent[..., None].expand(-1, -1, feature.shape[-1]))
            reach = descend(reach, parent)  # (B, W, m) which scratch slots each of them sees
            feature = self._forward(state.store, self._pair(above, token, target), reach)
            return target.head(feature)

        return expand(target.head(feature)[:, 0], step, sampler, coin, plan)

"""Modules that drafters share: rotary positions, Llama decoder layer, attention masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.causal_lm import CausalLM
from drafters.layers.fused_backward import rms_norm, rotate, swiglu
from drafters.layers.rope import frequencies, rope_settings


@dataclass(frozen=True)
class LayerShape:
    """Sizes, rotary positions and window of a decoder layer; flat keys of `settings` in config.json.

    Args:
        hidden_size: D, of the target.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: size of one head.
        intermediate_size: width of the SwiGLU MLP.
        eps: of the RMS norms.
        rope_theta: base of the rotary wavelengths.
        rope: scaling of the rotary positions, see `drafters.layers.rope`; None: no scaling.
        window: W, a query at position t sees the keys at i with t - W < i <= t; None: all up to t.
        sinks: S, it also sees the keys at i < S (StreamingLLM, arXiv:2309.17453).

    Raises:
        UserError: a window below 1, negative sinks, or sinks without a window.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    rope_theta: float
    rope: Mapping[str, Any] | None = None
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"drafter.window={self.window}: give at least 1, or null for the whole text")
        if self.sinks < 0:
            raise UserError(f"drafter.sinks={self.sinks}: give at least 0")
        if self.sinks and self.window is None:
            raise UserError(
                f"drafter.sinks={self.sinks}: without drafter.window a drafter sees all positions; "
                "set drafter.window, or leave sinks 0"
            )

    @classmethod
    def of(cls, target: CausalLM) -> Self:
        """The shape of the target's own decoder layers."""
        config = target.config
        heads = config.num_attention_heads
        theta, rope = rope_settings(config)
        return cls(
            hidden_size=target.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope=rope,
        )


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv:2104.09864), half-split as in Llama.

    Args:
        dim: size of one head.
        theta: base of the geometric series of wavelengths.
        rope: scaling, see `drafters.layers.rope`.
    """

    def __init__(self, dim: int, theta: float, rope: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.dim, self.theta, self.rope = dim, theta, rope
        frequencies(dim, theta, rope, torch.empty(0))  # validates the arguments
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def table(self, limit: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(positions >= limit, 2, 1, n) cosines and sines on the device of `like`, in its dtype or `dtype`.

        They rotate the first n <= dim elements of a head (partial rotary embedding).
        """
        # A plain attribute, not a buffer: casting the module to bf16 must not round the angles.
        dtype = dtype or like.dtype
        key = (like.device, dtype)
        table = self._tables.get(key)
        if table is None or table.shape[0] < limit:
            with torch.inference_mode(False):
                inverse_frequencies, scale = frequencies(self.dim, self.theta, self.rope, like)
                positions = torch.arange(max(256, 2 * limit), device=like.device)
                angles = positions[:, None] * inverse_frequencies
                angles = torch.cat([angles, angles], -1)[:, None]
                table = (torch.stack([angles.cos(), angles.sin()], 1) * scale).to(dtype)
            self._tables[key] = table
        return table


class RMSNorm(nn.RMSNorm):
    """RMS norm with the hand-written backward pass of `fused_backward.rms_norm`."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """A Llama decoder layer; the caller computes attention between `split` and `finish`.

    Args:
        shape: sizes.
        input_norm: whether the attention input is normalised (EAGLE-1's is not).
        inputs: number of vectors of size D that are concatenated into the attention input.
        qk_norm: whether queries and keys are normalised per head before they are rotated (Qwen3).
        qkv_bias: whether queries, keys and values have biases (Qwen2); they begin at 0.
        o_bias: whether the attention output has a bias (`attention_bias` of a Llama); it begins at 0.
    """

    def __init__(
        self,
        shape: LayerShape,
        input_norm: bool = True,
        inputs: int = 1,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__()
        hidden_size, eps, head_dim = shape.hidden_size, shape.eps, shape.head_dim
        heads, kv_heads = shape.heads, shape.kv_heads
        self.window, self.sinks = shape.window, shape.sinks
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.input_layernorm = RMSNorm(hidden_size, eps=eps) if input_norm else nn.Identity()
        # q, k, v are one product, and gate, up another: in small layers the overhead of calls dominates.
        self.qkv_proj = Linear(inputs * hidden_size, (heads + 2 * kv_heads) * head_dim, bias=qkv_bias)
        self.q_norm = RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity()
        self.qk_norm = qk_norm
        self.o_proj = Linear(heads * head_dim, hidden_size, bias=o_bias)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)
        self.gate_up_proj = Linear(hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, hidden_size, bias=False)
        for product in (self.qkv_proj, self.o_proj):
            if product.bias is not None:
                nn.init.zeros_(product.bias)

    @property
    def queries(self) -> int:
        """Number of query rows of `qkv_proj`; key and value rows follow."""
        return self.heads * self.head_dim

    def split(self, qkv: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., n) of `qkv_proj` -> queries (..., heads, dim), keys and values (..., kv_heads, dim).

        Input with only the key and value rows gives zero query heads.
        """
        rows = qkv.unflatten(-1, (-1, self.head_dim))  # (..., heads + 2 * kv_heads, dim)
        heads = rows.shape[-2] - 2 * self.kv_heads
        # Queries and keys are rotated in one call.
        qk, v = rows.split([heads + self.kv_heads, self.kv_heads], -2)
        if self.qk_norm:
            q, k = qk.split([heads, self.kv_heads], -2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], -2)
        q, k = rotate(qk, angles).split([heads, self.kv_heads], -2)
        return q, k, v

    def rotate_queries(self, q: Tensor, angles: Tensor) -> Tensor:
        """(..., heads * dim) of the query rows of `qkv_proj` -> rotated queries (..., heads, dim)."""
        return rotate(self.q_norm(q.unflatten(-1, (-1, self.head_dim))), angles)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """(..., D) residual and (..., heads * dim) attention output -> (..., D) output of the layer."""
        x = self.o_proj.add(x, attended)
        y = self.gate_up_proj(self.post_attention_layernorm(x))
        return self.down_proj.add(x, swiglu(y))


def level_visibility(reach: Tensor | None, parent: Tensor, scratch: int) -> Tensor | None:
    """`tree_visibility`, or None (causal) as long as all levels are single nodes.

    Args:
        reach: mask of the level above; None: causal.
        parent: (B, W') index of each entry's parent in the level above.
        scratch: number of scratch slots before this level.
    """
    if reach is None and parent.shape[1] == 1:
        return None
    if reach is None:
        reach = torch.ones(len(parent), 1, scratch, dtype=torch.bool, device=parent.device)
    return tree_visibility(reach, parent)


def tree_visibility(reach: Tensor, parent: Tensor) -> Tensor:
    """Attention mask of a new tree level: each entry sees itself and all that its parent sees.

    Args:
        reach: (B, W, m) bool, mask of the level above over the scratch slots.
        parent: (B, W') index of each entry's parent in the level above.

    Returns:
        (B, W', m + W') bool.
    """
    rows, width = parent.shape
    parent_sees = reach.gather(1, parent[..., None].expand(-1, -1, reach.shape[-1]))
    itself = torch.eye(width, dtype=torch.bool, device=parent.device)
    return torch.cat([parent_sees, itself.expand(rows, -1, -1)], -1)

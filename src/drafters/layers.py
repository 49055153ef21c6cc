"""Blocks that several drafters share: rotary positions, the decoder layer, its two attentions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from decode.fused import rotate


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv:2104.09864), half-split as in Llama.

    Args:
        dim: of one head.
        theta: base of the geometric series of wavelengths.
    """

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def table(self, limit: int, like: Tensor) -> Tensor:
        """(positions >= limit, 2, 1, dim) cosines and sines in the dtype and place of `like`."""
        # A plain attribute, not a buffer: casting the module must not round the angles.
        key = (like.device, like.dtype)
        table = self._tables.get(key)
        if table is None or table.shape[0] < limit:
            with torch.inference_mode(False):
                steps = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float64)
                places = torch.arange(max(256, 2 * limit), device=like.device)
                angles = places[:, None] * self.theta ** (-steps / self.dim)
                angles = torch.cat([angles, angles], -1)[:, None]
                table = torch.stack([angles.cos(), angles.sin()], 1).to(like.dtype)
            self._tables[key] = table
        return table


class RMSNorm(nn.RMSNorm):
    """Under autocast the input is bf16 and the weight fp32, which no fused kernel takes."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DecoderLayer(nn.Module):
    """A Llama decoder layer whose attention is left to the caller.

    Args:
        hidden_size: D.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: of one head.
        intermediate_size: of the SwiGLU MLP.
        eps: of the RMS norms.
        input_norm: whether the attention input is normalised (EAGLE-1's is not).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        eps: float,
        input_norm: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.input_layernorm = RMSNorm(hidden_size, eps=eps) if input_norm else nn.Identity()
        # One product each for q, k, v and for gate, up: at draft sizes a call costs more than its work.
        self.qkv_proj = nn.Linear(hidden_size, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, n, D) -> queries (B, heads, n, dim), keys and values (B, kv_heads, n, dim)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, self.head_dim))
        turning = self.heads + self.kv_heads
        qk = rotate(qkv[..., :turning, :], angles).transpose(1, 2)
        v = qkv[..., turning:, :].transpose(1, 2)
        return qk[:, : self.heads], qk[:, self.heads :], v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """(B, n, D) input and (B, heads, n, dim) attention output -> (B, n, D)."""
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        gate, up = self.gate_up_proj(y).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Grouped-query attention; mask (B, n, width) bool."""
    groups = q.shape[1] // k.shape[1]
    mask = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1)


def attend_unrolled(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of unroll step k (EAGLE-3's training-time test, arXiv:2503.01840).

    Query t belongs to anchor t. It sees the keys of step 0 up to its anchor, and of every later
    step its own anchor's key alone: a diagonal, so memory grows by (B, heads, T) a step and no
    (T, T + k) mask exists.

    Args:
        q: (B, heads, T, dim).
        keys: of steps 0 .. k, each (B, kv_heads, T, dim).
        values: alike.
    """
    groups = q.shape[1] // keys[0].shape[1]
    keys = [k.repeat_interleave(groups, 1) for k in keys]
    values = [v.repeat_interleave(groups, 1) for v in values]
    scale = q.shape[-1] ** -0.5
    length = q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ keys[0].transpose(-1, -2) * scale).masked_fill(~causal, -torch.inf)  # (B,h,T,T)
    own = [(q * k).sum(-1, keepdim=True) * scale for k in keys[1:]]  # each (B, h, T, 1)
    weight = torch.cat([scores, *own], -1).softmax(-1)
    out = weight[..., :length] @ values[0]
    for step, v in enumerate(values[1:]):
        out = out + weight[..., length + step, None] * v
    return out


def descend(reach: Tensor, parent: Tensor) -> Tensor:
    """What a new level of a tree sees: all that its parents see, and each entry itself.

    Args:
        reach: (B, W, m) bool, scratch slots that the entries of the level above see.
        parent: (B, W') entry of that level which each new one hangs from.

    Returns:
        (B, W', m + W') bool.
    """
    rows, width = parent.shape
    seen = reach.gather(1, parent[..., None].expand(-1, -1, reach.shape[-1]))
    own = torch.eye(width, dtype=torch.bool, device=parent.device)
    return torch.cat([seen, own.expand(rows, -1, -1)], -1)

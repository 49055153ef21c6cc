"""One forward pass of a Llama-like model with few calls: what a token costs at draft sizes.

transformers runs a decoder layer as some forty operations, each of which costs more to start than
to do when a pass reads a handful of tokens. Here q, k, v are one product, gate and up another, a
norm is one call, rotary angles are looked up, and nothing is dispatched by configuration. The
numbers are the same up to rounding: `probe` compares them with transformers' own before a model
may decode, and training and rescoring (`Target.read`, the audit) always run transformers' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decode.model.cache import RowStore

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}  # of the others, angles depend on the length


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (..., heads, dim) by its position's (..., 2, 1, dim) cosine and sine."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * angles[..., 0, :, :], turned, angles[..., 1, :, :])


class _Product(NamedTuple):
    """Linear maps of one input, stacked."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *maps: nn.Linear) -> Self:
        """The maps' weights become views of the stacked ones, so nothing is held twice."""
        weight = _stack([m.weight for m in maps])
        return cls(weight, None if maps[0].bias is None else _stack([m.bias for m in maps]))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].data
    whole = torch.cat([p.data for p in parts])
    for part, own in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = own
    return whole


class _Layer:
    """What one decoder layer computes with."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _Product.of(attention.o_proj)
        self.gate_up = _Product.of(mlp.gate_proj, mlp.up_proj)
        self.down = _Product.of(mlp.down_proj)
        self.activation = mlp.act_fn
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.of_queries = getattr(attention, "q_norm", None)  # Qwen3
        self.of_keys = getattr(attention, "k_norm", None)
        self.dim, self.scale = attention.head_dim, attention.scaling
        self.heads = len(attention.q_proj.weight) // self.dim
        self.turning = self.heads + len(attention.k_proj.weight) // self.dim

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, n, D) -> queries (B, heads, n, dim), keys and values (B, kv_heads, n, dim)."""
        qkv = self.qkv(_norm(self.before, x)).unflatten(-1, (-1, self.dim))
        qk, v = qkv[..., : self.turning, :], qkv[..., self.turning :, :]
        if self.of_queries is not None:
            q, k = qk[..., : self.heads, :], qk[..., self.heads :, :]
            qk = torch.cat([_norm(self.of_queries, q), _norm(self.of_keys, k)], -2)
        qk = rotate(qk, angles).transpose(1, 2)
        return qk[:, : self.heads], qk[:, self.heads :], v.transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """(B, n, D) input and (B, heads, n, dim) attention output -> (B, n, D)."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(_norm(self.between, x)).chunk(2, -1)
        return x + self.down(self.activation(gate) * up)


def _norm(module: Any, x: Tensor) -> Tensor:
    eps = module.eps if isinstance(module, nn.RMSNorm) else module.variance_epsilon
    return F.rms_norm(x, module.weight.shape, module.weight, eps)


class Fused:
    """The body of a Llama, Mistral, Qwen2 or Qwen3 model; made by `of`."""

    def __init__(self, base: Any) -> None:
        self.embed, self.norm, self.rotary = base.embed_tokens, base.norm, base.rotary_emb
        self.layers = [_Layer(layer) for layer in base.layers]
        self._angles: Tensor | None = None  # (positions, 2, 1, dim)

    @classmethod
    def of(cls, base: Any, layers: nn.ModuleList, config: Any) -> Fused | None:
        """The fused body of a model, or None where transformers' own has to run."""
        if not _fits(base, layers, config):
            return None
        made = _MADE.get(base)
        first = base.layers[0].self_attn.q_proj.weight
        # Casting or moving a model gives its parameters storage of their own again.
        if made is None or made.layers[0].qkv.weight.data_ptr() != first.data_ptr():
            with torch.inference_mode(False):  # the weights may be read by autograd yet
                made = _MADE[base] = cls(base)
        return made

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        store: RowStore,
        inputs: dict[int, Tensor],
    ) -> Tensor:
        """Read (B, n) tokens into the cache.

        Args:
            tokens: (B, n).
            positions: (B, n).
            mask: (B, 1, n, width) additive; None: all that is settled, and causal among themselves.
            store: already told to `begin`.
            inputs: its keys are layer ids; filled with the values that enter them, (B, n, D).

        Returns:
            (B, n, D) after the final norm.
        """
        x = self.embed(tokens)
        angles = self._table(store.width, x)[positions]  # (B, n, 2, 1, dim)
        causal = mask is None and tokens.shape[1] > 1
        for index, layer in enumerate(self.layers):
            if index in inputs:
                inputs[index] = x
            q, k, v = layer.project(x, angles)
            k, v = store.write(index, k, v)
            grouped = layer.turning < 2 * layer.heads
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale, enable_gqa=grouped
            )
            x = layer.finish(x, attended)
        return _norm(self.norm, x)

    def _table(self, limit: int, like: Tensor) -> Tensor:
        if self._angles is None or len(self._angles) < limit:
            places = torch.arange(max(256, 2 * limit), device=like.device)[None]
            self._angles = torch.stack(self.rotary(like, places), -2)[0, :, :, None]
        return self._angles


_MADE: WeakKeyDictionary[nn.Module, Fused] = WeakKeyDictionary()


def _fits(base: Any, layers: nn.ModuleList, config: Any) -> bool:
    """Whether this is a frozen model of a known class that nobody has altered."""
    # private API: transformers has no public way to ask for the attention kernel.
    if {type(layer).__name__ for layer in layers} - LAYERS or config._attn_implementation != "sdpa":
        return False
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return False
    if base.rotary_emb.rope_type not in STATIC_ROTARY:
        return False
    # transformers' norms round to fp32 whatever the dtype; who asks for fp64 wants those very numbers.
    if base.norm.weight.dtype == torch.float64 and not isinstance(base.norm, nn.RMSNorm):
        return False
    # Training may keep weights in buffers of its own; adapters and hooks do more than the weights say.
    altered = (
        any(p.requires_grad for p in m.parameters(recurse=False)) or _hooked(m) for m in base.modules()
    )
    plain = all(
        type(m) is nn.Linear for layer in layers for n, m in layer.named_modules() if n.endswith("_proj")
    )
    return plain and not any(altered)


def _hooked(module: nn.Module) -> bool:
    # private API: torch has no public way to ask whether a module has hooks.
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)

"""Fused forward pass of Llama-like models for passes over a few tokens.

transformers runs about forty operations per decoder layer; with few tokens, launching them costs more
than computing. Here q, k, v are one matrix product, gate and up are another, a norm is one call, and
rotary angles are looked up. Results equal transformers' up to rounding, which `probe` checks before a
model may decode. Training and rescoring (`Target.read`, the audit) always run transformers' code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from decode.kernels.half_products import HALF
from decode.kernels.norm import rms_norm
from decode.kernels.packed_linear import linear, linear_add
from decode.kernels.weight_state import WeightState, counted, weight_state
from decode.model.attention import attend
from decode.model.cache import RowStore
from decode.transfer import on_device_only

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
COMPILED_SLOTS = 64  # with more, products dominate the launches
STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}  # angles that do not depend on the sequence length


class Parts(NamedTuple):
    """Which sublayers of a decoder layer run."""

    attention: bool
    mlp: bool


WHOLE = Parts(attention=True, mlp=True)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embedding: (..., heads, dim) with (..., 2, 1, dim) cosine and sine."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * angles[..., 0, :, :], rotated, angles[..., 1, :, :])


class StackedLinear(NamedTuple):
    """Several linear layers with the same input, as one product."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear) -> Self:
        """Stack the layers; their weights become views of the stacked one, so memory does not grow."""
        weight = _stack([m.weight for m in layers])
        return cls(weight, None if layers[0].bias is None else _stack([m.bias for m in layers]))

    def __call__(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return linear(x, self.weight, self.bias)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + output, in one call."""
        return linear_add(residual, x, self.weight, self.bias)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate frozen parameters and turn them into views of the result."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([p.data for p in parts])
    for part, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = view
    return nn.Parameter(whole, requires_grad=False)


class LayerSteps:
    """What a decoder layer computes before and after attention.

    Attributes:
        qkv: (..., D) -> (..., (heads + 2 kv_heads) * dim).
        out: its `add` maps a residual and attention's output to their sum.
        gate_up: the two halves of the MLP's input.
        down: like `out`, for the MLP.
        activation: of the gate.
        input_norm: before attention.
        mlp_norm: before the MLP.
        qk_norm: of queries and of keys (Qwen3), or None.
        dim: size of a head.
        scale: of the attention scores.
        heads: number of query heads.
        qk_heads: number of query and key heads.
    """

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    activation: Any
    input_norm: Any
    mlp_norm: Any
    qk_norm: Any
    dim: int
    scale: float
    heads: int
    qk_heads: int

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, n, D) -> queries (B, heads, n, dim), keys and values (B, kv_heads, n, dim)."""
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (-1, self.dim))
        qk, v = qkv[..., : self.qk_heads, :], qkv[..., self.qk_heads :, :]
        if self.qk_norm is not None:
            q_norm, k_norm = self.qk_norm
            qk = torch.cat([q_norm(qk[..., : self.heads, :]), k_norm(qk[..., self.heads :, :])], -2)
        qk = rotate(qk, angles).transpose(1, 2)
        return qk[:, : self.heads], qk[:, self.heads :], v.transpose(1, 2)

    def add_attention(self, x: Tensor, attention: Tensor) -> Tensor:
        """(B, n, D) input and (B, heads, n, dim) attention output -> (B, n, D) input of the MLP."""
        return self.out.add(x, attention.transpose(1, 2).contiguous().flatten(2))

    def add_mlp(self, x: Tensor) -> Tensor:
        """(B, n, D) -> (B, n, D) output of the layer."""
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return self.down.add(x, self.activation(gate) * up)


class FusedLayer(LayerSteps):
    """Weights and sizes of one decoder layer of transformers."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = StackedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = StackedLinear.of(attention.o_proj)
        self.gate_up = StackedLinear.of(mlp.gate_proj, mlp.up_proj)
        self.down = StackedLinear.of(mlp.down_proj)
        self.activation = mlp.act_fn
        self.input_norm, self.mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.qk_norm = None
        if hasattr(attention, "q_norm"):
            self.qk_norm = Norm(attention.q_norm), Norm(attention.k_norm)
        self.dim, self.scale = attention.head_dim, attention.scaling
        self.heads = len(attention.q_proj.weight) // self.dim
        self.qk_heads = self.heads + len(attention.k_proj.weight) // self.dim


class Norm:
    """RMS norm with the weights of a transformers or torch module."""

    def __init__(self, module: Any) -> None:
        self.weight = module.weight
        self.eps: Any = module.eps if isinstance(module, nn.RMSNorm) else module.variance_epsilon
        half = self.weight.dtype in HALF
        self.twice = torch.cat([self.weight.data] * 2) if half and self.weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return rms_norm(x, self.weight, self.eps, self.twice)


class CompiledPass(Protocol):
    """Decoder layers and final norm as one call; see `compiled_forward`.

    Attributes:
        most: maximum number of tokens per pass for which it is faster.
    """

    most: int

    def __call__(
        self, x: Tensor, angles: Tensor, mask: Tensor | None, store: RowStore, inputs: dict[int, Tensor]
    ) -> Tensor:
        """(B, n, D) embeddings, (B, n, 2, 1, dim) angles -> (B, n, D); other arguments as in `Fused`."""
        ...


class Fused:
    """Decoder layers and final norm of a Llama, Mistral, Qwen2 or Qwen3 model; see `of`."""

    def __init__(self, base: Any) -> None:
        self.embed, self.norm, self.rotary = base.embed_tokens, Norm(base.norm), base.rotary_emb
        self.layers = [FusedLayer(layer) for layer in base.layers]
        self.compiled: CompiledPass | None = None  # used for up to `COMPILED_SLOTS` slots
        self._copied: list[Tensor] = []
        self.watch(base, (norm.weight for norm in self._norms() if norm.twice is not None))
        self._angles: Tensor | None = None  # (positions, 2, 1, dim)

    @classmethod
    def of(cls, base: Any, layers: nn.ModuleList, config: Any) -> Fused | None:
        """The fused body of a model (cached); None if the model needs transformers' code."""
        if not _fits(base, layers, config):
            return None
        fused = _CACHE.get(base)
        # Rebuild after a cast or move of the model, after new parameters (they have storage of their own),
        # and after a change of copied weights.
        if fused is None or fused._state != fused._current(base):
            with torch.inference_mode(False):  # autograd may use the weights later
                fused = _CACHE[base] = cls(base)
        return fused

    def watch(self, base: nn.Module, weights: Iterable[Tensor]) -> None:
        """Rebuild this object when one of these copied weights changes."""
        self._copied += weights
        self._state = self._current(base)

    def _current(self, base: nn.Module) -> tuple[list[tuple[int, int]], list[WeightState]]:
        """State of all weights, and of the copied ones; see `weight_state`."""
        return [counted(p) for p in base.parameters()], [weight_state(w) for w in self._copied]

    def _norms(self) -> Iterator[Norm]:
        for layer in self.layers:
            yield from (layer.input_norm, layer.mlp_norm, *(layer.qk_norm or ()))
        yield self.norm

    def __call__(
        self,
        positions: Tensor,
        mask: Tensor | None,
        store: RowStore,
        inputs: dict[int, Tensor],
        parts: Sequence[Parts] | None = None,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Run n new slots and write their keys and values to the cache.

        Args:
            positions: (B, n).
            mask: (B, 1, n, width) additive; None: causal.
            store: cache, after `begin`.
            inputs: dict with layer ids as keys; filled with the (B, n, D) inputs of these layers.
            parts: sublayers to run in each layer; omitted ones add nothing and write no keys. None: all.
            input_ids: (B, n) tokens.
            inputs_embeds: (B, n, D) instead of tokens.

        Returns:
            (B, n, D) output of the final norm.
        """
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        angles = self.angles(store.longest, x)[positions]  # (B, n, 2, 1, dim)
        compiled, (rows, slots) = self.compiled, x.shape[:2]
        causal = mask is None and slots > 1
        few = slots <= COMPILED_SLOTS and not causal and parts is None
        # A graph of a round is made of torch's operations, and compiled as a whole.
        if compiled and not on_device_only() and few and rows * slots <= compiled.most:
            return compiled(x, angles, mask, store, inputs)
        for index, layer in enumerate(self.layers):
            part = WHOLE if parts is None else parts[index]
            if index in inputs:
                inputs[index] = x
            if part.attention:
                q, k, v = layer.project(x, angles)
                k, v = store.write(index, k, v)
                x = layer.add_attention(x, attend(q, k, v, mask, causal, layer.scale))
            if part.mlp:
                x = layer.add_mlp(x)
        return self.norm(x)

    def angles(self, limit: int, like: Tensor) -> Tensor:
        """(positions, 2, 1, dim) cosine and sine of at least `limit` positions, cached."""
        if self._angles is None or len(self._angles) < limit:
            positions = torch.arange(max(256, 2 * limit), device=like.device)[None]
            self._angles = torch.stack(self.rotary(like, positions), -2)[0, :, :, None]
        return self._angles


_CACHE: WeakKeyDictionary[nn.Module, Fused] = WeakKeyDictionary()


def _fits(base: Any, layers: nn.ModuleList, config: Any) -> bool:
    """Whether this is a frozen, unmodified model of a known class."""
    # private API: transformers has no public way to ask for the attention kernel.
    if {type(layer).__name__ for layer in layers} - LAYERS or config._attn_implementation != "sdpa":
        return False
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return False
    if base.rotary_emb.rope_type not in STATIC_ROTARY:
        return False
    # transformers' norms compute in fp32 for every dtype; keep that behaviour for fp64 models.
    if base.norm.weight.dtype == torch.float64 and not isinstance(base.norm, nn.RMSNorm):
        return False
    # Trained weights may be in other buffers; hooks may change a module's output.
    modified = (
        any(p.requires_grad for p in m.parameters(recurse=False)) or _hooked(m) for m in base.modules()
    )
    unadapted = all(
        type(m) is nn.Linear for layer in layers for n, m in layer.named_modules() if n.endswith("_proj")
    )
    return unadapted and not any(modified)


def _hooked(module: nn.Module) -> bool:
    # private API: torch has no public way to ask whether a module has hooks.
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)

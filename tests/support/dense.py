"""The unroll of EAGLE-1, PRISM and EAGLE-3 the slow way: every position, dense masks, no shared products."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Batch, DraftStep
from drafters.models.eagle3 import Eagle3
from drafters.models.prism import Prism


def norm(x: Tensor, module: torch.nn.Module | None) -> Tensor:
    if not isinstance(module, torch.nn.RMSNorm):
        return x
    assert module.eps is not None
    return x / (x.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """(T, heads, dim) by complex multiplication."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    spin = torch.polar(torch.ones(len(positions), half, dtype=x.dtype), positions[:, None] * speed)
    z = torch.complex(x[..., :half], x[..., half:]) * spin[:, None]
    return torch.cat([z.real, z.imag], -1)


def layer_step(layer, y: Tensor, x: Tensor, times: Tensor, theta: float, past: list) -> Tensor:
    """All T positions of one text; `past` holds the keys and values of every depth so far."""
    qkv = plus(y @ layer.qkv_proj.weight.T, layer.qkv_proj.bias).unflatten(-1, (-1, layer.head_dim))
    q, k, v = qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], -2)
    group = layer.heads // layer.kv_heads
    past.append(tuple(t.repeat_interleave(group, 1) for t in (turned(k, times, theta), v)))
    q, length = turned(q, times, theta), len(y)
    see = torch.cat([visible(layer, length, len(past), depth) for depth in range(1, len(past) + 1)], 1)
    keys, values = (torch.cat([pair[i] for pair in past]) for i in (0, 1))
    score = torch.einsum("qhd,khd->hqk", q, keys) * layer.head_dim**-0.5
    weight = score.masked_fill(~see, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weight, values).flatten(1)
    x = x + plus(attended @ layer.o_proj.weight.T, layer.o_proj.bias)
    gate, up = (norm(x, layer.post_attention_layernorm) @ layer.gate_up_proj.weight.T).chunk(2, -1)
    return x + (gate / (1 + (-gate).exp()) * up) @ layer.down_proj.weight.T


def visible(layer, length: int, depth: int, other: int) -> Tensor:
    """(T, T) bool: whether the query of anchor t at `depth` sees the key of anchor i at depth `other`."""
    t, i = torch.arange(length)[:, None], torch.arange(length)
    see = i <= t if other == 1 else i == t
    if layer.window is None:
        return see
    place, key = t + depth - 1, i + other - 1
    return see & ((place - layer.window < key) | (key < layer.sinks))


def module_of(drafter, depth: int):
    """What has the weights of a depth."""
    if not isinstance(drafter, Prism):
        return drafter
    order = drafter.settings["modules"]
    return [drafter, *drafter.later][[*order, *order[-1:] * depth][depth - 1]]


def dense(drafter, batch: Batch, target) -> dict[tuple[int, int, int], Tensor]:
    """(row, anchor, depth) -> (D,) what the head reads, of every anchor, supervised or not."""
    found = {}
    for row, tokens in enumerate(batch.tokens):
        length = len(tokens)
        taps = batch.taps[row]
        third = isinstance(drafter, Eagle3)
        if third:
            if drafter.fc_norm is not None:
                parts = zip(taps.unbind(1), drafter.fc_norm, strict=True)
                taps = torch.stack([norm(t, m) for t, m in parts], 1)
            feature = norm(taps.flatten(1), drafter.input_norm) @ drafter.fc.weight.T
        else:
            feature = taps[:, 0]
        past, x = [[] for _ in drafter.stack], feature
        for depth in range(1, drafter.depth + 1):
            embedded = target.embed(tokens.roll(-depth))
            times = torch.arange(length) + depth - 1
            part = module_of(drafter, depth)
            for i, layer in enumerate(part.stack):
                if i:
                    y = norm(x, layer.input_layernorm)
                elif third:
                    y = torch.cat(
                        [norm(embedded, layer.input_layernorm), norm(feature, drafter.hidden_norm)], 1
                    )
                    x = norm(feature, drafter.hidden_norm) if drafter.norm_before_residual else feature
                else:
                    x = y = part.fc(torch.cat([embedded, feature], 1))
                x = layer_step(layer, y, x, times, drafter.rotary.theta, past[i])
            hidden = norm(x, drafter.norm) if third else x
            feature = hidden if third and drafter.norm_output else x
            found |= {(row, t, depth): hidden[t] for t in range(length)}
    return found


def steps(head, anchors, hidden, aux=None):
    return [
        DraftStep(h, a, depth, head, aux[depth - 1] if aux else {})
        for depth, (a, h) in enumerate(zip(anchors, hidden, strict=True), 1)
    ]

"""Probabilities of a target that drafts for itself: its modules with a dense mask, without a cache."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from decode.model.causal_lm import record_inputs
from decode.model.fused_forward import WHOLE
from drafters.drafting.sublayer_search import parts_of


@torch.no_grad()
def self_drafted(drafter, target, texts, depths) -> dict[tuple[int, int, int], torch.Tensor]:
    """(row, anchor, depth) -> the distribution of token anchor + 1 + depth, of `SelfDrafter`s."""
    word = drafter.settings.get("sublayers")
    parts = [WHOLE] * len(target.layers) if word is None else parts_of(word)
    rows, length = texts.shape
    model, place = target.model.model, torch.arange(length)
    settled = dict.fromkeys(range(len(model.layers)), torch.empty(0))
    with record_inputs(model.layers, settled):
        model(input_ids=texts, use_cache=False)
    # Blocks: of every anchor t the tokens from t + 1 on, clamped at the end, where nobody looks.
    at = (place[:, None] + 1 + torch.arange(depths)).clamp_max(length - 1)  # (T, K)
    x = model.embed_tokens(texts)[:, at]  # (B, T, K, D)
    causal = torch.ones(depths, depths, dtype=torch.bool).tril()
    for index, (layer, part) in enumerate(zip(model.layers, parts, strict=True)):
        if part.attention:
            norm, attention = layer.input_layernorm, layer.self_attn
            q, k, v = _projected(attention, model.rotary_emb, norm(x).flatten(1, 2), at.flatten())
            q_old, old_k, old_v = _projected(attention, model.rotary_emb, norm(settled[index]), place)
            q, k, v = (part.unflatten(2, at.shape) for part in (q, k, v))  # (B, heads, T, K, dim)
            old = torch.einsum("bhtkd,bhsd->bhtks", q, old_k) * attention.scaling
            hidden = ~visible_places(drafter, attention, q_old, old_k)[:, :, :, None]  # (B, heads, T, 1, T)
            own = torch.einsum("bhtkd,bhtjd->bhtkj", q, k) * attention.scaling
            scores = torch.cat(
                [old.masked_fill(hidden, -torch.inf), own.masked_fill(~causal, -torch.inf)], -1
            )
            weight = scores.softmax(-1)
            out = torch.einsum("bhtks,bhsd->bhtkd", weight[..., :length], old_v)
            out = out + torch.einsum("bhtkj,bhtjd->bhtkd", weight[..., length:], v)
            x = x + attention.o_proj(out.permute(0, 2, 3, 1, 4).flatten(3))
        if part.mlp:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    last = model.norm(x)
    if getattr(drafter, "exit", None) is not None:
        last = last + last @ drafter.exit.weight.T
    all_probs = target.head(last).softmax(-1)
    return {
        (row, t, depth): all_probs[row, t, depth - 1]
        for row in range(rows)
        for t in range(length)
        for depth in range(1, depths + 1)
        if t + depth + 1 < length
    }


def visible_places(drafter, attention, queries, keys) -> torch.Tensor:
    """(B, heads, T, T) bool: the settled places that a draft behind anchor t sees at a layer."""
    rows, heads, length = queries.shape[:3]
    every = torch.ones(length, length, dtype=torch.bool).tril()
    if "refresh" not in drafter.settings:
        return every.expand(rows, heads, -1, -1)
    seen = torch.zeros(rows, heads, length, length, dtype=torch.bool)
    scores = (queries @ keys.mT * attention.scaling).masked_fill(~every, -torch.inf)
    groups = attention.num_key_value_groups
    mass = scores.softmax(-1).unflatten(1, (-1, groups)).sum(2)  # (B, kv_heads, T, T)
    options = drafter.settings
    for t in range(length):
        known = (t + 1) // options["refresh"] * options["refresh"]  # places of the newest selection
        newest = known - (options["recent"] - options["refresh"])
        if newest <= options["sinks"] + options["places"]:
            seen[:, :, t, : t + 1] = True
            continue
        seen[:, :, t, : options["sinks"]] = True
        seen[:, :, t, newest : t + 1] = True
        asked = mass[:, :, known - options["queries"] : known].sum(2)[..., options["sinks"] : newest]
        best = (options["sinks"] + asked.topk(options["places"]).indices).repeat_interleave(groups, 1)
        seen[:, :, t].scatter_(2, best, value=True)
    return seen


def _projected(attention, rotary, x, places):
    """(B, n, D) at (n,) places -> (B, heads, n, dim) queries, keys and values, alike in a group."""
    q, k, v = (
        part(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = rotary(x, places[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    groups = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

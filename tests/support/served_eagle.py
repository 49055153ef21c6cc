"""How vLLM 0.32 and SGLang 0.5.23 load an EAGLE and what they compute, restated from their source.

`Loaded` knows only a folder's config.json and tensors: names are changed and shapes asked for as the
loaders do, and what they would pass over in silence is an error here. `captured` is what such an
engine's target hands to the drafter, taken by hooks of a Hugging Face model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.export.layout import Layout

IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's qwen3_eagle3.py


class LoadError(AssertionError):
    """What an engine would refuse, or load without a word and then draft nonsense."""


def expected(config: dict[str, Any], engine: str, eagle3: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an engine's parameters, q, k, v and gate, up apart."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    if config.get("bias"):
        raise LoadError("bias is attention's, too, in both engines")
    biased, qwen3 = attention_biases(config, engine, eagle3), config["model_type"] == "qwen3"
    found: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_hidden_layers"]):
        at, width = f"layers.{i}.", size * (2 if eagle3 and i == 0 else 1)
        rows = {"q": queries, "k": keys, "v": keys}
        found |= {f"{at}self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()}
        found[f"{at}self_attn.o_proj.weight"] = (size, queries)
        found |= {f"{at}self_attn.{x}_proj.bias": (rows.get(x, size),) for x in biased}
        if qwen3:
            found |= {f"{at}self_attn.{x}_norm.weight": (head,) for x in "qk"}
        found |= {f"{at}mlp.{x}_proj.weight": (inner, size) for x in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (size, inner)
        found[f"{at}post_attention_layernorm.weight"] = (size,)
        later = "hidden_norm" if eagle3 and engine == "sglang" else "input_layernorm"
        norms = ([] if not eagle3 else ["input_layernorm", "hidden_norm"]) if i == 0 else [later]
        found |= {f"{at}{norm}.weight": (size,) for norm in norms}
    if not eagle3:
        found["fc.weight"] = (size, 2 * size)
        if engine == "sglang":
            found["fc.bias"] = (size,)
        return found
    taps = number_of_taps(config)
    found |= {"fc.weight": (size, taps * size), "norm.weight": (size,)}
    found["lm_head.weight"] = (config.get("draft_vocab_size") or config["vocab_size"], size)
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = (taps * size,)
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (size,) for i in range(taps)}
    return found


def attention_biases(config: dict[str, Any], engine: str, eagle3: bool) -> str:
    """Letters of the projections with a bias, which stay uninitialised where the file has none."""
    if engine == "authors":
        return "qkv" if config.get("qkv_bias") and not eagle3 else ""
    if not config.get("attention_bias"):
        return ""
    if engine == "sglang" and eagle3:
        raise LoadError("its q, k and v are made without biases")
    return "qkv" if config["model_type"] == "qwen3" else "qkvo"


def number_of_taps(config: dict[str, Any]) -> int:
    """Both engines: a number, or as many as `eagle_config` names, or 3."""
    ids = (config.get("eagle_config") or {}).get(IDS)
    return config.get("num_aux_hidden_states") or (len(ids) if ids else 3)


class Loaded:
    """An EAGLE as vllm or sglang has it; `embedding` and, for EAGLE-1, `head` are the (V, D) target's."""

    def __init__(self, layout: Layout, engine: str, embedding: Tensor, head: Tensor) -> None:
        self.config, self.engine, self.embedding = layout.config, engine, embedding
        self.serve = layout.serve
        (name,) = self.config["architectures"]
        self.eagle3 = name in ("LlamaForCausalLMEagle3", QWEN3)
        known = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", QWEN3) if engine == "vllm" else ()
        known = known or ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3")
        kind = "qwen3" if name == QWEN3 else "llama"
        if name not in known or self.config["model_type"] != kind or self.config["tie_word_embeddings"]:
            raise LoadError(f"{name} is no drafter of {engine}")
        if engine == "sglang" and self.eagle3:
            if "target_hidden_size" in self.config:
                raise LoadError("target_hidden_size is used even where it is null")
            if self.config.get("norm_before_residual"):
                raise LoadError("a norm that it passes over")
            if number_of_taps(self.config) == 1:
                raise LoadError("fc is left out: one tap is as wide as a feature that is fed back")
        self.ids: Tensor | None = None
        self.weights: dict[str, Tensor] = {}
        wanted = expected(self.config, engine, self.eagle3)
        for file_name, tensor in layout.tensors.items():
            self._load(file_name.replace("midlayer.", "layers.0."), tensor, wanted)
        if missing := sorted(wanted.keys() - self.weights):
            raise LoadError(f"{missing[0]} stays random")
        vocab = self.config["vocab_size"]
        if self.eagle3 and self.ids is None:
            if self.config["draft_vocab_size"] < vocab:
                raise LoadError("d2t is missing: draft ids are taken for the target's")
            self.ids = torch.arange(vocab)
        self.head = self.weights["lm_head.weight"] if self.eagle3 else head
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**self.config))

    def _load(self, name: str, tensor: Tensor, wanted: dict[str, tuple[int, ...]]) -> None:
        if name == "t2d":
            return
        if name == "d2t":
            if self.engine == "vllm" and self.config["draft_vocab_size"] == self.config["vocab_size"]:
                raise LoadError("no parameter named 'draft_id_to_target_id'")  # it has one only for fewer
            if tensor.dtype != torch.long:
                raise LoadError("d2t is not int64")
            self.ids = tensor + torch.arange(len(tensor))
            if self.ids.min() < 0 or self.ids.max() >= self.config["vocab_size"]:
                raise LoadError("d2t leads out of the vocabulary")
            return
        if name not in wanted:
            raise LoadError(f"{name} has no parameter")
        if tuple(tensor.shape) != wanted[name]:
            raise LoadError(f"{name} is {tuple(tensor.shape)}, not {wanted[name]}")
        self.weights[name] = tensor

    # -- what it computes ----------------------------------------------------------------------

    def combine(self, read: Tensor) -> Tensor:
        """(B, n, L * D) or, EAGLE-1, (B, n, D) from the target -> (B, n, D) features."""
        if not self.eagle3:
            return read
        if self.config.get("norm_before_fc"):
            read = self._norm(read, "input_norm")
        if self.config.get("fc_norm"):
            parts = read.chunk(number_of_taps(self.config), -1)
            read = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return F.linear(read, self.weights["fc.weight"])

    def forward(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n) tokens and (B, n, D) features of a whole text -> logits (B, n, V), and what is fed back."""
        x = F.embedding(tokens, self.embedding)
        if self.eagle3:
            normed = self._norm(feature, "layers.0.hidden_norm")
            first = torch.cat([self._norm(x, "layers.0.input_layernorm"), normed], -1)
            x = normed if self.config.get("norm_before_residual") else feature
        else:
            bias = self.weights.get("fc.bias")
            first = x = F.linear(torch.cat([x, feature], -1), self.weights["fc.weight"], bias)
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}."
            later = "hidden_norm" if self.eagle3 and self.engine == "sglang" else "input_layernorm"
            x = x + self._attend(first if i == 0 else self._norm(x, f"{at}{later}"), at)
            y = self._norm(x, f"{at}post_attention_layernorm")
            gate, up = (self._linear(y, f"{at}mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{at}mlp.down_proj")
        if not self.eagle3:
            return F.linear(x, self.head), x
        hidden = self._norm(x, "norm")
        drafted = F.linear(hidden, self.head)
        logits = drafted.new_full((*drafted.shape[:-1], self.config["vocab_size"]), -torch.inf)
        logits[..., self.ids] = drafted
        return logits, hidden if self.config.get("norm_output") else x

    def _attend(self, x: Tensor, at: str) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            self._linear(x, f"{at}self_attn.{part}_proj").view(rows, length, -1, self.config["head_dim"])
            for part in "qkv"
        )
        if self.config["model_type"] == "qwen3":
            q, k = (self._norm(part, f"{at}self_attn.{x}_norm") for part, x in ((q, "q"), (k, "k")))
        cosine, sine = self.rotary(x, torch.arange(length)[None])
        attended = attend(q, k, v, cosine[:, None], sine[:, None], self.window())
        return self._linear(attended.flatten(2), f"{at}self_attn.o_proj")

    def window(self) -> int | None:
        """vLLM's is in `layer_types`, counted on from the target's layers; SGLang's in its command."""
        if self.engine == "sglang":
            words = self.serve.split()
            flag = "--speculative-draft-window-size"
            return int(words[words.index(flag) + 1]) + 1 if flag in words else None
        if not (kinds := self.config.get("layer_types")):
            return None
        if not self.eagle3 and "target_layer_count" not in self.config:
            raise LoadError("out of bounds for layer_types")
        return self.config["sliding_window"] if kinds[0] == "sliding_attention" else None

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, window: int | None = None
) -> Tensor:
    """(B, n, heads, dim) queries, keys and values; rotary cosines and sines end with (n, dim)."""

    def turned(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return x * cosine + torch.cat([-other, one], -1) * sine

    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (turned(k), v))
    seen = torch.ones(q.shape[2], q.shape[2]).bool().tril()
    if window is not None:
        seen = seen.triu(1 - window)
    scores = (turned(q) @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def captured(model: Any, tokens: Tensor, loaded: Loaded) -> Tensor:
    """What the engine's target hands over, (B, T, L * D); (B, T, D) after its final norm for EAGLE-1."""
    config, layers = loaded.config, model.model.layers
    found: dict[int, Tensor] = {}
    last: list[Tensor] = []
    if loaded.engine == "vllm" or IDS not in (config.get("eagle_config") or {}):
        entering = config.get(IDS) if loaded.engine == "vllm" else None
    else:  # outputs of layers, of which SGLang takes what enters the next
        entering = [output + 1 for output in config["eagle_config"][IDS]]
    entering = entering or [2, len(layers) // 2, len(layers) - 3]

    def keep(i: int):
        def hook(module, args, kwargs):
            found[i] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in entering]
    handles.append(model.model.norm.register_forward_hook(lambda m, a, out: last.append(out)))
    model(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    # Gathered while the layers run: from the lowest to the highest.
    return torch.cat([found[i] for i in sorted(found)], -1) if loaded.eagle3 else last[0]


def drafted(loaded: Loaded, model: Any, texts: Tensor, depth: int) -> dict[tuple[int, int], Tensor]:
    """(anchor, depth) -> (B, V) logits, told the text: pair i is what was read at i, and token i + 1."""
    return fed_back(loaded.forward, texts, loaded.combine(captured(model, texts, loaded)), depth)


def fed_back(forward: Any, texts: Tensor, feature: Tensor, depth: int) -> dict[tuple[int, int], Tensor]:
    """What a drafter gives that is told the text, and reads what it feeds back from depth 2 on."""
    found = {}
    for anchor in range(texts.shape[1] - 2):
        fed = feature[:, : anchor + 1]
        for ahead in range(1, min(depth, texts.shape[1] - 2 - anchor) + 1):
            logits, back = forward(texts[:, 1 : anchor + 1 + ahead], fed)
            found[anchor, ahead] = logits[:, -1]
            fed = torch.cat([fed, back[:, -1:]], 1)
    return found

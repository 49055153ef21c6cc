"""What vLLM 0.32's MTP classes compute, restated from their source, from an exported folder's tensors.

`mimo_mtp.py`: [hidden; token]. `qwen3_next_mtp.py`: [token; hidden], gated attention of normalised heads, and
zero-centred norms. `deepseek_mtp.py` and `glm4_moe_mtp.py` with a layer of Llama's kind: [token; hidden]; GLM
feeds back what has not passed the norm. The embedding of the first pair, which all but Qwen's set to 0, is
read here.
"""

from __future__ import annotations

from typing import Any

import torch
from served_eagle import attend, fed_back
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from drafters.export.layout import Layout

# Prefix, fusion, norms of token and hidden, last norm, prefix of the layer (-: none).
NAMES = {
    "mimo": "model.mtp_layers.0. input_proj token_layernorm hidden_layernorm final_layernorm -",
    "qwen": "mtp. fc pre_fc_norm_embedding pre_fc_norm_hidden norm layers.0.",
    "speculators": "mtp_layers.0. input_proj token_layernorm hidden_layernorm final_layernorm -",
    "deepseek": "model.layers.4. eh_proj enorm hnorm shared_head.norm -",
}


# Names in a target of Qwen's kind -> speculators' (`convert/mtp/converter.py`), a prefix each.
SPECULATORS = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}


def speculators_layout(tensors: dict[str, Tensor], layers: dict[str, Any], name: str, depth: int) -> Layout:
    """speculators' folder of a head that has Qwen's names; `layers`: config, `name`: of the target."""
    renamed = {
        new + full.removeprefix(old): tensor
        for full, tensor in tensors.items()
        for old, new in SPECULATORS.items()
        if full.startswith(old)
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth}
    proposals = {"default_proposal_method": "greedy", "proposal_methods": [proposal]}
    verifier = {"name_or_path": name, "architectures": ["LlamaForCausalLM"]}
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "mtp", "verifier": verifier, **proposals},
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }
    return Layout(config, renamed)


class ServedMtp:
    """One head of a kind (mimo, qwen, deepseek, glm, speculators); all tensors of its folder must be read."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        kind: str,
        config: dict[str, Any],
        target: Any,
        centred: bool | None = None,
    ) -> None:
        self.centred = kind == "qwen" if centred is None else centred
        self.kind, self.target, self.config = kind, target, LlamaConfig(**config)
        stem, *names = NAMES["deepseek" if kind == "glm" else kind].split()
        self.names = [name.removeprefix("-") for name in names]
        self.left = {name.removeprefix(stem): tensor for name, tensor in tensors.items()}
        assert all(name.startswith(stem) for name in tensors)
        self.weights = dict(self.left)

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n) tokens and (B, n, D) states of a whole text -> logits (B, n, V), and what is fed back."""
        fc, token_norm, hidden_norm, last_norm, at = self.names
        parts = [self.norm(F.embedding(tokens, self.target.embed.weight), token_norm)]
        parts.insert(0 if self.kind == "mimo" else 1, self.norm(hidden, hidden_norm))
        x = self.linear(torch.cat(parts, -1), fc)
        x = x + self.attend(self.norm(x, f"{at}input_layernorm"), f"{at}self_attn.")
        y = self.norm(x, f"{at}post_attention_layernorm")
        gate, up = (self.linear(y, f"{at}mlp.{part}_proj") for part in ("gate", "up"))
        x = x + self.linear(F.silu(gate) * up, f"{at}mlp.down_proj")
        out = self.norm(x, last_norm)
        return F.linear(out, self.target.head.weight), x if self.kind == "glm" else out

    def attend(self, x: Tensor, at: str) -> Tensor:
        rows, length, _ = x.shape
        dim, count = self.config.head_dim, self.config.num_attention_heads
        q, k, v = (self.linear(x, f"{at}{part}_proj").view(rows, length, -1, dim) for part in "qkv")
        gate = None
        if q.shape[2] == 2 * count:
            q, gate = q.view(rows, length, count, 2, dim).unbind(3)
        if f"{at}q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{at}q_norm"), self.norm(k, f"{at}k_norm")
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = torch.arange(length)[:, None] * self.config.rope_parameters["rope_theta"] ** -steps
        out = attend(q, k, v, *(part.repeat(1, 2) for part in (angles.cos(), angles.sin())))
        out = out if gate is None else out * gate.sigmoid()
        return self.linear(out.flatten(2), f"{at}o_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.read(f"{name}.weight"), self.read(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        unit = x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        weight = self.read(f"{name}.weight")
        return unit * (weight + self.centred)

    def read(self, name: str) -> Any:
        self.left.pop(name, None)
        return self.weights.get(name)


def drafted(served: ServedMtp, texts: Tensor, hidden: Tensor, depth: int) -> dict[tuple[int, int], Tensor]:
    """(anchor, depth) -> (B, V) logits."""
    return fed_back(served.forward, texts, hidden, depth)

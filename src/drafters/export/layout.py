"""What a drafter is on file, in our own terms and in another program's, and the commands that serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from decode.model.target import Target

FILES = ("config.json", "model.safetensors")


class Saved(NamedTuple):
    """A drafter without its code.

    Attributes:
        drafter: short name, as in `registry.CLASSES`.
        settings: its constructor's.
        weights: by the names that it has for them.
        confidence: it has a confidence head, which no engine reads.
    """

    drafter: str
    settings: Mapping[str, Any]
    weights: dict[str, Tensor]
    confidence: bool = False


class Layout(NamedTuple):
    """The same in another program's terms.

    Attributes:
        config: of `config.json`.
        tensors: of `model.safetensors`.
        serve: template of the command that serves it, for a shell; `{target}` and `{drafter}` stand
            for where these are, and other braces are doubled.
        note: what else its user has to know.
        files: other files of the folder, by name.
        model: a whole model in the place of `tensors`: transformers alone knows by which names it
            stores the weights of each family.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    serve: str = ""
    note: str = ""
    files: Mapping[str, bytes] = MappingProxyType({})
    model: PreTrainedModel | None = None

    def command(self, target: str, drafter: str) -> str:
        """The one that serves it, for a shell, whatever is in these names; "" where nothing does."""
        plain = {"target": target, "drafter": drafter}
        quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in plain.items()}
        # Word by word: a name may stand inside of a word, as in JSON.
        words = [
            word.format(**(quoted if word.startswith("{{") else plain)) for word in shlex.split(self.serve)
        ]
        return shlex.join(words)

    def write(self, folder: Path) -> None:
        """Into an existing folder."""
        if self.model is None:
            save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / FILES[1])
        else:
            self.model.save_pretrained(folder)
        (folder / FILES[0]).write_text(json.dumps(self.config, indent=1, sort_keys=True) + "\n")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def without_confidence(saved: Saved) -> dict[str, Tensor]:
    """Its weights without the confidence head, which no engine reads."""
    return {name: value for name, value in saved.weights.items() if not name.startswith("confidence.")}


# Raises UserError: what that program cannot load, with what to train or export instead.
Writer = Callable[[Saved, Target], Layout]


class Reader(NamedTuple):
    """Another program's files as ours.

    Attributes:
        name: of the format, for people.
        knows: whether a `config.json` is of this format.
        read: its files, for a target; raises UserError: another target's, or what we have no drafter for.
    """

    name: str
    knows: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Layout, Target], Saved]


# Parts of `drafters.layers.decoder_layer.DecoderLayer` that Llama has one level deeper.
PARENTS = {"o_proj": "self_attn", "q_norm": "self_attn", "k_norm": "self_attn", "down_proj": "mlp"}


def split_projections(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of a `DecoderLayer` under Llama's names: q, k, v and gate, up apart."""
    tensors: dict[str, Tensor] = {}
    queries, keys = (settings[name] * settings["head_dim"] for name in ("heads", "kv_heads"))
    for name, weight in weights.items():
        stem, part, end = name.rpartition("qkv_proj.")
        if part:
            rows = zip("qkv", weight.split([queries, keys, keys]), strict=True)
            tensors |= {f"{stem}self_attn.{letter}_proj.{end}": part_weight for letter, part_weight in rows}
            continue
        stem, part, end = name.rpartition("gate_up_proj.")
        if part:
            gate, up = weight.chunk(2)
            tensors |= {f"{stem}mlp.gate_proj.{end}": gate, f"{stem}mlp.up_proj.{end}": up}
            continue
        for part, home in PARENTS.items():
            name = name.replace(f"{part}.", f"{home}.{part}.")
        tensors[name] = weight
    return tensors


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `unfused`."""
    weights: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        stem, part, end = name.rpartition("self_attn.q_proj.")
        if part:
            rows = [tensors[f"{stem}self_attn.{letter}_proj.{end}"] for letter in "qkv"]
            weights[f"{stem}qkv_proj.{end}"] = torch.cat(rows)
            continue
        stem, part, end = name.rpartition("mlp.gate_proj.")
        if part:
            weights[f"{stem}gate_up_proj.{end}"] = torch.cat([weight, tensors[f"{stem}mlp.up_proj.{end}"]])
            continue
        if not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            for part, home in PARENTS.items():
                name = name.replace(f"{home}.{part}.", f"{part}.")
            weights[name] = weight
    return weights


def serve_vllm(method: str, tokens: int) -> str:
    """`vllm serve` with a drafter of this method, for drafts of so many tokens."""
    return (
        f'vllm serve {{target}} --speculative-config \'{{{{"method": "{method}", "model": "{{drafter}}", '
        f'"num_speculative_tokens": {tokens}}}}}\''
    )


def serve_sglang(algorithm: str, tokens: int) -> str:
    """SGLang's server with a drafter of this algorithm, for chains of so many tokens.

    A chain, since that is what `foredraft verify-served` can hold against a scorecard.
    """
    return (
        f"{_sglang(algorithm)} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )


def serve_sglang_block(algorithm: str, width: int) -> str:
    """The same for a drafter that writes blocks of this width, the root among them."""
    return f"{_sglang(algorithm)} --speculative-num-draft-tokens {width}"


def _sglang(algorithm: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {drafter}"
    )

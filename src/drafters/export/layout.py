"""A drafter's settings and weights, its files in another program's format, and serving commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.model.target import Target

FILES = ("config.json", "model.safetensors")


class Saved(NamedTuple):
    """Settings and weights of a drafter.

    Attributes:
        drafter: short name, as in `registry.KNOWN`.
        settings: arguments of its constructor.
        weights: by the drafter's names.
        confidence: whether it has a confidence head; engines read only a DSpark's.
    """

    drafter: str
    settings: Mapping[str, Any]
    weights: dict[str, Tensor]
    confidence: bool = False


class Layout(NamedTuple):
    """A drafter in another program's format.

    Attributes:
        config: content of `config.json`.
        tensors: content of `model.safetensors`.
        serve: shell command that serves it, a template with `{target}` and `{drafter}`; other braces
            are doubled.
        note: further information for users.
        files: other files of the folder, by name.
        torch_file: name of a `torch.save` file of the tensors, written instead of `model.safetensors` for a
            program that reads no other. It holds only tensors, so `weights_only` reads it.
        model: a transformers model, saved by `save_pretrained` instead of `tensors`.
        weights: writes the weights into the folder in the program's own file, instead of `tensors`.
        file: SHA-256 of a GGUF file that has exactly these weights; "": none.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    serve: str = ""
    note: str = ""
    files: Mapping[str, bytes] = MappingProxyType({})
    torch_file: str = ""
    model: PreTrainedModel | None = None
    weights: Callable[[Path], None] | None = None
    file: str = ""

    def command(self, target: str, drafter: str) -> str:
        """Shell command that serves the drafter, with names quoted; "" if no program serves it."""
        plain = {"target": target, "drafter": drafter}
        quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in plain.items()}
        # Word by word, since a name may be part of a word, such as a JSON object.
        words = [
            word.format(**(quoted if word.startswith("{{") else plain)) for word in shlex.split(self.serve)
        ]
        return shlex.join(words)

    def write(self, folder: Path) -> None:
        """Write the files into an existing folder."""
        if self.weights:
            self.weights(folder)
        elif self.torch_file:
            # Not cloned: torch.save stores a tensor that several heads share once.
            tensors = {name: value.detach().contiguous() for name, value in self.tensors.items()}
            torch.save(tensors, folder / self.torch_file)
        elif self.model is None:
            save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / FILES[1])
        else:
            self.model.save_pretrained(folder)
        (folder / FILES[0]).write_text(json.dumps(self.config, indent=1, sort_keys=True) + "\n")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def without_confidence(saved: Saved) -> dict[str, Tensor]:
    """Weights without the confidence head."""
    return {name: value for name, value in saved.weights.items() if not name.startswith("confidence.")}


class Refusal(NamedTuple):
    """One reason why a program cannot serve a drafter.

    Attributes:
        reason: part of an error message.
        train: settings to train with to avoid it; empty if there are none.
    """

    reason: str
    train: Mapping[str, Any] = MappingProxyType({})


class Format(NamedTuple):
    """A program's format for one kind of drafter.

    Attributes:
        write: converts the drafter; raises UserError only for causes that depend on trained values.
        check: yields the reasons why the program cannot serve a drafter with these `Saved.settings` for
            this target; reads no weights.
        length: draft length of the serving command, from the settings; None: no program serves it.
    """

    write: Callable[[Saved, Target], Layout]
    check: Callable[[Mapping[str, Any], Target], Iterator[Refusal]]
    length: Callable[[Mapping[str, Any]], int] | None = None


class Reader(NamedTuple):
    """Reader of another program's format.

    Attributes:
        name: of the format, for messages.
        matches: whether a `config.json` is in this format.
        read: converts the files; raises UserError for another target's or an unsupported drafter.
    """

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Layout, Target], Saved]


# Setting of a drafter -> attention projections that it gives a bias.
BIASES = {"qkv_bias": "qkv", "o_bias": "o"}
# Part of `DecoderLayer` -> its parent module in Llama.
PARENTS = {"o_proj": "self_attn", "q_norm": "self_attn", "k_norm": "self_attn", "down_proj": "mlp"}


def split_projections(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of `DecoderLayer`s under Llama's names, with separate q, k, v and gate, up projections."""
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
    """The inverse of `split_projections`."""
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


def engine_biases(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add zeros for biases that an engine builds and a drafter does not have: they stay uninitialised there.

    `attention_bias` gives biases to q, k, v and o in a Llama, and to q, k and v in vLLM's Qwen3.

    Args:
        tensors: by Llama's names.
        settings: of the drafter.
    """
    if not has_biases(settings):
        return dict(tensors)
    zeros = {}
    for name, weight in tensors.items():
        stem, part, letter = name.removesuffix("_proj.weight").rpartition("self_attn.")
        if part and letter in ("qkv" if settings.get("qk_norm") else "qkvo"):
            zeros[f"{stem}{part}{letter}_proj.bias"] = torch.zeros_like(weight[:, 0])
    return zeros | dict(tensors)


def has_biases(settings: Mapping[str, Any]) -> bool:
    """Whether a drafter's attention has biases."""
    return any(settings.get(name) for name in BIASES)


def split_biases(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """The inverse of `engine_biases`: the tensors without biases that are 0 in all layers, and settings.

    Raises:
        UserError: `attention_bias` in the layers' config, and no biases.
    """
    if config.get("attention_bias") and not any(name.endswith("_proj.bias") for name in tensors):
        raise UserError("its config has attention_bias, and its tensors have no biases")
    kept, settings = dict(tensors), {}
    for setting, letters in BIASES.items():
        ends = tuple(f"self_attn.{letter}_proj.bias" for letter in letters)
        found = [name for name in tensors if name.endswith(ends)]
        settings[setting] = any(bool(tensors[name].any()) for name in found)
        if not settings[setting]:
            for name in found:
                del kept[name]
    return kept, settings


def trained_depth(settings: Mapping[str, Any]) -> int:
    """Draft length of a drafter with one head per depth, or with one block."""
    return int(settings["depth"])


def serve_vllm(method: str, tokens: int, parallel: bool = False) -> str:
    """`vllm serve` command for a speculative method with drafts of `tokens` tokens.

    `parallel`: an EAGLE-3 drafts all of them in one pass.
    """
    more = ', "parallel_drafting": true' if parallel else ""
    return (
        f'vllm serve {{target}} --speculative-config \'{{{{"method": "{method}", "model": "{{drafter}}", '
        f'"num_speculative_tokens": {tokens}{more}}}}}\''
    )


def serve_sglang(algorithm: str, tokens: int) -> str:
    """SGLang server command for an algorithm with chains of `tokens` tokens.

    `foredraft verify-served` can compare chains with a scorecard.
    """
    return (
        f"{_sglang(algorithm)} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )


def serve_sglang_block(algorithm: str, width: int) -> str:
    """SGLang server command for a block drafter; `width` includes the root."""
    return f"{_sglang(algorithm)} --speculative-num-draft-tokens {width}"


def _sglang(algorithm: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {drafter}"
    )

"""Medusa and the MLP speculator: export to vLLM and Medusa's authors' code, import of their files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import Format, Layout, Reader, Refusal, Saved, serve_vllm, trained_depth
from drafters.export.llama_config import check_head, check_size, check_tensor_names
from drafters.export.shapes import check_path, dtype_of, target_path

MLP_NOTE = (
    "vLLM 0.9.2 is the last version that runs an MLP speculator: later ones removed speculative decoding "
    "from the V0 engine (vLLM pull request 21152), and V1 refuses the method (issue 47825)."
)
MEDUSA_NOTE = "vLLM 0.32 is the last version that runs Medusa heads: 0.33 refuses the method."
TUNED_NOTE = (
    "drafter=medusa2 has tuned the target, and its heads fit only the tuned one: export it with to=hf, and "
    "replace TUNED_TARGET by that folder."
)
LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")  # FasterDecoding's names
HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
AUTHORS_FILE = "medusa_lm_head.pt"  # the only file that FasterDecoding's loader reads, in all versions
AUTHORS_TARGETS = ("LlamaForCausalLM", "MistralForCausalLM")
AUTHORS_HEADS = 5  # versions from 1.0 on build this many, with any config.json


# -- Medusa ----------------------------------------------------------------------------------------


def _check_medusa(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_head(target)
    if (kind := settings["token_info"]) != "none":
        yield Refusal(f"vLLM's Medusa has no token_info={kind}", {"token_info": "none"})


def _medusa(saved: Saved, target: Target) -> Layout:
    """Files for vLLM's `medusa`, with the same names of layers and heads as ours.

    Its heads are linear without bias, followed by a scale. It has no soft cap, but drafts the most likely
    tokens, which a cap does not change. Its loader does not share the target's head, so the file has it.
    """
    settings = saved.settings
    tensors = {n: w for n, w in saved.weights.items() if n.startswith(("blocks.", "lm_heads."))}
    if not settings["own_head"]:
        tensors["lm_head.weight"] = target.head.weight.detach()
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": settings["hidden_size"],
        "vocab_size": settings["vocab_size"],
        "truncated_vocab_size": settings["vocab_size"],
        "num_heads": settings["depth"],
        "num_hidden_layers": settings["layers"],
        "medusa_fc_bias": settings["bias"],
        "original_lm_head": not settings["own_head"],
        "logit_scale": target.head.scale,
        "torch_dtype": dtype_of(tensors),
    }
    return Layout(config, tensors, serve_vllm("medusa", settings["depth"]), MEDUSA_NOTE)


def _medusa2(saved: Saved, target: Target) -> Layout:
    """The heads; `hf_model.TUNED` exports the tuned target."""
    layout = _medusa(saved, target)
    note = f"{TUNED_NOTE} {MEDUSA_NOTE}"
    return layout._replace(serve=layout.serve.replace("{target}", "TUNED_TARGET"), note=note)


def _check_authors(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_head(target)
    yield from check_path(target)
    if (name := type(target.model).__name__) not in AUTHORS_TARGETS:
        known = " and ".join(AUTHORS_TARGETS)
        yield Refusal(f"the target is a {name}, and the authors' code supports only {known}")
    if (kind := settings["token_info"]) != "none":
        yield Refusal(f"the authors' Medusa has no token_info={kind}", {"token_info": "none"})
    if settings["layers"] > 1:  # it repeats one block
        yield Refusal(
            f"{settings['layers']} layers per head, which share their weights in the authors' code",
            {"layers": 1},
        )


def _to_authors(saved: Saved, target: Target) -> Layout:
    """Files of `MedusaModel` (FasterDecoding): heads as a `torch.save` file, and the name of the target.

    Layers have a bias, and every depth has its own head, without a scale.
    """
    settings, weights, tensors = saved.settings, saved.weights, {}
    shared = (target.head.weight.detach() * target.head.scale).cpu()
    for i in range(settings["depth"]):
        weight = weights[f"blocks.{i}.layers.0.weight"]
        bias = weights.get(f"blocks.{i}.layers.0.bias", torch.zeros_like(weight[0]))
        head = weights[f"lm_heads.{i}.weight"] * target.head.scale if settings["own_head"] else shared
        tensors |= {f"{i}.0.linear.weight": weight, f"{i}.0.linear.bias": bias, f"{i}.1.weight": head}
    config = {
        "model_type": "medusa",  # otherwise AutoConfig guesses it from the folder's name
        "medusa_num_heads": settings["depth"],
        "medusa_num_layers": 1,
        "base_model_name_or_path": target_path(target),
        "torch_dtype": dtype_of(tensors),
    }
    return Layout(config, tensors, note=_authors_note(settings["depth"]), torch_file=AUTHORS_FILE)


def _authors_note(depth: int) -> str:
    note = "FasterDecoding/Medusa loads this folder by MedusaModel.from_pretrained(<this folder>)."
    if depth == AUTHORS_HEADS:
        return note
    fewer = f"heads beyond this drafter's {depth} are random, so use no longer path in medusa_choices"
    more = f"it uses {AUTHORS_HEADS} of this drafter's {depth}"
    built = f"From version 1.0 on it builds {AUTHORS_HEADS} heads for any config.json"
    return f"{note} {built}: {fewer if depth < AUTHORS_HEADS else more}."


def read_medusa(layout: Layout, target: Target) -> Saved:
    """Read Medusa in vLLM's or FasterDecoding's format.

    Numbers of heads and layers come from the tensors, since published configs have smaller ones.

    Raises:
        UserError: another target, a reduced vocabulary, or missing or unknown tensors.
    """
    if target.head.bias is not None:
        raise UserError("this target's head has a bias, and this Medusa's heads have none")
    config = layout.config
    tensors = dict(_renamed(re.sub(r"^medusa_heads?\.", "", n), w) for n, w in layout.tensors.items())
    if "token_map" in tensors:
        raise UserError(
            f"its heads cover {len(tensors['token_map'])} tokens (token_map), and drafter=medusa covers all"
        )
    numbers = [re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name) for name in tensors]
    depth = 1 + max((int(n[1]) for n in numbers if n), default=-1)
    layers = 1 + max((int(n[2]) for n in numbers if n), default=-1)
    biases = [name for name in tensors if name.endswith(".bias")]
    if not any(tensors[name].any() for name in biases):  # the authors' layers always have one, possibly zeros
        tensors = {name: weight for name, weight in tensors.items() if name not in biases}
        biases = []
    bias = bool(biases)
    if depth * layers > len(tensors):  # an untrusted number must not become a loop count
        raise UserError(
            f"tensors are missing: their names ask for {depth} x {layers} layers, {len(tensors)} are there"
        )
    depths, layer_ids = range(depth), range(layers)
    parts = ("weight", "bias") if bias else ("weight",)
    blocks = [f"blocks.{i}.layers.{j}.{part}" for i in depths for j in layer_ids for part in parts]
    heads = [f"lm_heads.{i}.weight" for i in depths]
    if config.get("original_lm_head"):
        heads = [next((name for name in ("lm_head.weight", *heads[:1]) if name in tensors), "lm_head.weight")]
    elif not any(name in tensors for name in heads):
        heads = []
    check_tensor_names(tensors, [*blocks, *heads])
    head_weights = {f"lm_heads.{i}.weight": tensors[heads[i % len(heads)]] for i in depths} if heads else {}
    _check_size(target, tensors["blocks.0.layers.0.weight"].shape[0], [len(w) for w in head_weights.values()])
    head_weights = _scaled(head_weights, config.get("logit_scale", 1.0) / target.head.scale)
    if config.get("original_lm_head") and _is_target_head(head_weights, target):
        head_weights = {}
    weights = {name: tensors[name] for name in blocks} | head_weights
    settings = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "depth": depth}
    settings |= {"layers": layers, "own_head": bool(head_weights), "bias": bias}
    return Saved("medusa", settings, weights)


def _renamed(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """A tensor under vLLM's and our name."""
    if match := LAYER.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}", weight
    if match := HEAD.fullmatch(name):
        return f"lm_heads.{match[1]}.weight", weight
    return name, weight


def _scaled(heads: dict[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Heads times `ratio`, to compensate for the target's scale, which follows every head here."""
    return heads if ratio == 1 else {name: weight * ratio for name, weight in heads.items()}


def _is_target_head(heads: Mapping[str, Tensor], target: Target) -> bool:
    """Whether the shared head equals the target's."""
    head = target.head.weight
    return torch.equal(next(iter(heads.values())).to(head), head)


# -- MLP speculator --------------------------------------------------------------------------------


def _check_mlp(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    del settings, target
    yield from ()


def _mlp(saved: Saved, target: Target) -> Layout:
    """Files for vLLM's `mlp_speculator`; tied weights are stored once, under the name of the first depth."""
    del target
    settings, depth = saved.settings, saved.settings["depth"]
    tied = settings["tie_weights"] and depth > 1  # vLLM asserts that tied weights have several depths
    names = _mlp_names(depth, tied)
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": settings["vocab_size"],
        "emb_dim": settings["hidden_size"],
        "inner_dim": settings["inner_size"] or settings["hidden_size"],
        "n_predict": depth,
        "top_k_tokens_per_head": [1] * depth,  # only its length is read
        "n_candidates": 1,
        "tie_weights": tied,
        "scale_input": settings["scale_input"],
        "torch_dtype": dtype_of(saved.weights),
    }
    command = "VLLM_USE_V1=0 " + serve_vllm("mlp_speculator", depth)
    return Layout(config, {name: saved.weights[name] for name in names}, command, MLP_NOTE)


def read_mlp(layout: Layout, target: Target) -> Saved:
    """Read the MLP speculator in the format of vLLM and IBM.

    Raises:
        UserError: another target, or missing or unknown tensors.
    """
    config = layout.config
    tensors = {name.removeprefix("speculator."): weight for name, weight in layout.tensors.items()}
    depth, tied = config["n_predict"], bool(config.get("tie_weights", config.get("tie_wts", False)))
    if not (isinstance(depth, int) and 0 < depth <= len(tensors)):
        raise UserError(f"config.json: n_predict={depth!r} for {len(tensors)} tensors")
    names = _mlp_names(depth, tied)
    # Some files repeat tied weights under the names of all depths.
    check_tensor_names(tensors, names, _mlp_names(depth, False))
    _check_size(target, config["emb_dim"], [len(w) for n, w in tensors.items() if n.startswith("head.")])
    settings = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "depth": depth}
    settings |= {"inner_size": len(tensors["ln.0.weight"]), "tie_weights": tied}
    if settings["inner_size"] != (config.get("inner_dim") or config["emb_dim"]):
        inner_dim = config.get("inner_dim")
        raise UserError(f"config.json: inner_dim={inner_dim}, the tensors: {settings['inner_size']}")
    settings["scale_input"] = bool(config.get("scale_input", False))
    return Saved("mlp", settings, {name: tensors[name] for name in names})


def _mlp_names(depth: int, tied: bool) -> list[str]:
    parts = ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    names = [part.format(i) for part in parts for i in range(1 if tied else depth)]
    return names + [f"proj.{i}.weight" for i in range(min(depth, 2) if tied else depth)]


# -- both ------------------------------------------------------------------------------------------


def _check_size(target: Target, hidden: int, rows: Iterable[int]) -> None:
    check_size("hidden size", target.hidden_size, hidden)
    for count in rows:
        check_size("vocabulary", target.vocab_size, count)


MEDUSA = Format(_medusa, _check_medusa, trained_depth)
MEDUSA2 = Format(_medusa2, _check_medusa, trained_depth)
MLP = Format(_mlp, _check_mlp, trained_depth)
MEDUSA_AUTHORS = Format(_to_authors, _check_authors)
MEDUSA_READER = Reader(
    "Medusa (vLLM, FasterDecoding)",
    lambda config: config.get("model_type") == "medusa" or "medusa_num_heads" in config,
    read_medusa,
)
MLP_READER = Reader("MLP speculator", lambda config: config.get("model_type") == "mlp_speculator", read_mlp)

"""Build Hugging Face models for drafters: from a configuration, from layers of the target, with LoRA."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.errors import UserError
from decode.model.causal_lm import CausalLM
from decode.model.load import auto_class, kernels
from decode.model.target import Target

# Keys of a configuration that name remote code, or describe the origin or dtype of the original weights.
FOREIGN = {
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
}
BASE, DOWN, UP = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"  # peft's names
LORA = ("r", "alpha", "targets")  # keys of `drafter.lora`


def portable_config(value: Any) -> Any:
    """A configuration without `FOREIGN` keys at any depth."""
    if isinstance(value, dict):
        return {k: portable_config(v) for k, v in value.items() if k not in FOREIGN}
    return [portable_config(v) for v in value] if isinstance(value, list) else value


def build(config: dict[str, Any], masked: bool = False) -> PreTrainedModel:
    """A model with random weights in fp32, of a class that is part of transformers.

    Args:
        config: as transformers writes it.
        masked: as in `decode.model.load.load_config`.

    Raises:
        UserError: the configuration is not one of a language model.
    """
    try:
        full = AutoConfig.for_model(**portable_config(config))
        return auto_class(full, masked).from_config(full, trust_remote_code=False, **kernels(full))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"drafter: its config gives no language model ({_first_line(error)})") from None


def training_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of trained weights: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def spaced_layers(total: int, count: int) -> list[int]:
    """Evenly spaced layer ids including the first and the last; a single one is the first.

    Raises:
        UserError: `count` is not from 1 to `total`.
    """
    if not 1 <= count <= total:
        raise UserError(f"drafter.layers={count}: the target has {total}; choose 1 to {total}")
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def cut_target(target: Target, count: int) -> PreTrainedModel:
    """A copy of the target with `count` of its layers, in fp32 or wider.

    Embedding, final norm and head are copied. Lists in the configuration with one entry per layer
    (`layer_types`) are cut as well. If weights still do not fit, the model is refused.

    Raises:
        UserError: `count` is out of range, or the class does not allow it.
    """
    source, total = target.model, len(target.layers)
    layer_ids = spaced_layers(total, count)
    refusal = f"drafter.path=null: a {type(source).__name__} cannot be cut; set drafter.path to a model"
    if target.config is not source.config or not type(source).__module__.startswith("transformers."):
        raise UserError(refusal)
    config = json.loads(source.config.to_json_string(use_diff=False))
    for name, value in config.items():
        if "layer" in name and isinstance(value, list) and len(value) == total:
            config[name] = [value[i] for i in layer_ids]
    config[source.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = count
    stack = next(name for name, module in source.named_modules() if module is target.layers) + "."
    weights = {name: value for name, value in source.state_dict().items() if not name.startswith(stack)}
    for number, layer in enumerate(layer_ids):
        layer_weights = target.weights(target.layers[layer])
        weights |= {f"{stack}{number}.{name}": value for name, value in layer_weights.items()}
    model: Any = build(config)
    model.to(training_dtype(target.dtype))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{refusal} ({_first_line(error)})") from None
    return model.eval()


def check_lora(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Validate names and ranges of `drafter.lora`.

    Raises:
        UserError: names the first invalid option.
    """
    for name in lora:
        if name not in LORA:
            why = ": its noise would be no function of the seed and the step" if name == "dropout" else ""
            raise UserError(f"drafter.lora.{name}: there is no such option{why}; it has {', '.join(LORA)}")
    for name in ("r", "alpha"):
        if type(value := lora.get(name)) is not int or value < 1:
            raise UserError(f"drafter.lora.{name}={value}: give a whole number, at least 1")
    return dict(lora)


def add_lora(
    model: PreTrainedModel, r: int, alpha: int, targets: str | list[str] = "all-linear"
) -> dict[str, list[int]]:
    """Add LoRA adapters to a model in place and freeze all other weights (arXiv:2106.09685).

    Args:
        model: changed in place.
        r: rank.
        alpha: adapters are scaled by alpha / r.
        targets: suffixes of module names, or `all-linear`: all but the head.

    Returns:
        Name of each adapted module -> [input size, output size].

    Raises:
        UserError: a target does not exist, is not linear, or is a head tied to the embedding.
    """
    from peft import LoraConfig, inject_adapter_in_model  # only needed to train adapters

    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, fan_in_fan_out=transposed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of a tied head; it is refused below
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise UserError(f"drafter.lora: {_first_line(error)}") from None
    shapes = {name: weight.shape for name, weight in model.named_parameters() if ".lora_" in name}
    stems = [name.removesuffix(DOWN) for name in shapes if name.endswith(DOWN)]
    if 2 * len(stems) != len(shapes):
        raise UserError("drafter.lora: only linear maps can have adapters; change its targets")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    inner: Any = getattr(head, "base_layer", None)
    if inner is not None and inner.weight is embedding.weight:
        raise UserError("drafter.lora: the head is the embedding as well; leave it out of the targets")
    return {stem: [shapes[stem + DOWN][1], shapes[stem + UP][0]] for stem in stems}


def merge_lora(weights: Mapping[str, Any], model: torch.nn.Module, scale: float) -> dict[str, Tensor]:
    """Merge adapters into their weights: W + scale B A, in fp32 or wider.

    Args:
        weights: by plain or peft's names, with adapters; others pass unchanged.
        model: with or without adapters; shows whether a weight is transposed (`Conv1D`).
        scale: alpha / r.

    Raises:
        KeyError: an adapter without its other factor or without its weight.
    """
    plain = {n.replace(f"{BASE}.", "."): w for n, w in weights.items() if not n.endswith((DOWN, UP))}
    for stem in [name.removesuffix(DOWN) for name in weights if name.endswith(DOWN)]:
        name, layer = f"{stem}.weight", _submodule(model, stem)
        down, up = (weights[stem + part].to(training_dtype(plain[name].dtype)) for part in (DOWN, UP))
        delta = scale * (up @ down)
        transposed = isinstance(getattr(layer, "base_layer", layer), Conv1D)
        plain[name] = plain[name] + (delta.mT if transposed else delta)
    return plain


def _submodule(model: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise KeyError(name) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def checkpoint_layers(lm: CausalLM) -> None:
    """Store only the inputs of decoder layers for the backward pass, and recompute the rest."""
    # transformers' own switch needs training mode, and that enables dropout.
    for layer in lm.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

"""Multi-token-prediction heads in checkpoints of targets: names, arrangement, and reading them from file.

transformers drops these tensors when it loads a target, so they are read from its safetensors files. Names
and arrangements follow vLLM 0.32: `{mimo,deepseek,glm4_moe,qwen3_next,qwen3_5}_mtp.py` and the classes
of their targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from decode.errors import UserError
from decode.model.files.folder import is_file_name
from decode.model.target import Target
from drafters.hub import download
from drafters.hub.untrusted_files import header, is_hub_id, read_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERTS = (".experts.", ".mlp.gate.", ".shared_expert", ".mlp.router.")
LATENT = ".kv_a_proj_with_mqa."
LARGE = 64.0  # input of a norm so large that eps does not matter


class Family(NamedTuple):
    """Names of one family of checkpoints; `prefix` may have `{n}`, the number of the target's layers."""

    prefix: str
    fc: str
    token_norm: str
    hidden_norm: str
    norm: str
    layer: str = ""  # of the decoder layer, after `prefix`
    shared: tuple[str, ...] = ()  # copies of the target's embedding and head; engines ignore them
    second: str = ""  # prefix of a second MTP layer


class Arrangement(NamedTuple):
    """Properties of an MTP head that its tensors do not show.

    Attributes:
        hidden_first: whether `fc` reads [hidden; token], not [token; hidden].
        before_norm: whether the target's hidden state is taken before its final norm.
        norm_output: whether the state that is fed back has passed the head's own norm.
    """

    hidden_first: bool
    before_norm: bool
    norm_output: bool


FAMILIES: Mapping[str, Family] = {
    "mimo": Family(
        "model.mtp_layers.0.",
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        second="model.mtp_layers.1.",
    ),
    "qwen": Family(
        "mtp.",
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        "layers.0.",
        second="mtp.layers.1.",
    ),
    "deepseek": Family(
        "model.layers.{n}.",
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        shared=("embed_tokens.weight", "shared_head.head.weight"),
        second="model.layers.{m}.",
    ),
}
# Arrangements in vLLM's classes by the target's `model_type`; for other targets they are scored.
MIMOS, USUAL = Arrangement(True, True, True), Arrangement(False, False, True)
KNOWN: Mapping[str, Arrangement] = {
    "mimo": MIMOS,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "exaone_moe"), USUAL),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32"), USUAL),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), Arrangement(False, False, False)),
}
MIMO = "MiMoForCausalLM"  # a Qwen2 configuration may name this architecture
# Our names of a decoder layer's parts -> theirs.
PARTS = {
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "down_proj": "mlp.down_proj",
}
PRODUCTS = {
    "qkv_proj": [f"self_attn.{part}_proj" for part in "qkv"],
    "gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}
OPTIONAL = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
BIASES = {f"{part}.bias" for part in PRODUCTS["qkv_proj"]}


class MtpHead(NamedTuple):
    """A head as read from file.

    Attributes:
        family: key of `FAMILIES`.
        settings: of the drafter's layer, as far as the tensors show them.
        weights: by the drafter's names.
    """

    family: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]


def architecture_of(target: Target) -> str:
    """First entry of `architectures` in the target's configuration, or ""."""
    names = getattr(target.model.config, "architectures", None) or [""]
    return names[0]


def arrangement_of(target: Target) -> Arrangement | None:
    """The arrangement of a target's own head; None: unknown."""
    kind = "mimo" if architecture_of(target) == MIMO else target.config.model_type
    return KNOWN.get(kind)


def mimo_arrangement(target: Target) -> Arrangement:
    """Arrangement of vLLM's MiMo head: all targets but MiMo pass the input of their output head."""
    return Arrangement(hidden_first=True, before_norm=architecture_of(target) == MIMO, norm_output=True)


def find(names: Iterable[str], target: Target) -> tuple[str, dict[str, str]]:
    """The family of an MTP head in a checkpoint, and its tensors' names: without prefix -> on file.

    Returns:
        "" and no names if there is no MTP head.

    Raises:
        UserError: several layers, a mixture of experts, or latent attention.
    """
    names, count = set(names), len(target.layers)
    for kind, family in FAMILIES.items():
        prefix = family.prefix.format(n=count)
        if f"{prefix}{family.fc}.weight" not in names:
            continue
        own = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        if any(part in name for name in own.values() for part in EXPERTS):
            raise UserError(
                "drafter=mtp: the target's MTP layer is a mixture of experts, which is not trained here; "
                "train drafter=eagle3"
            )
        if any(LATENT in name for name in own.values()):
            raise UserError(
                "drafter=mtp: the target's MTP layer has latent attention (MLA), which is not trained here; "
                "train drafter=eagle3"
            )
        if any(name.startswith(family.second.format(m=count + 1)) for name in names):
            raise UserError(
                "drafter=mtp: the target has several MTP layers, and here one is shared by all depths; "
                "train drafter=eagle3"
            )
        return kind, own
    return "", {}


def read(tensors: Mapping[str, Tensor], target: Target) -> MtpHead | None:
    """The MTP head among the tensors of a checkpoint; None: there is none.

    Raises:
        UserError: see `find`; tensors that are missing, unknown or of another target's sizes.
    """
    kind, own = find(tensors, target)
    if not kind:
        return None
    family, size = FAMILIES[kind], target.hidden_size
    found = {name: tensors[full] for name, full in own.items() if name not in family.shared}
    vectors = {
        "fc.weight": family.fc,
        "token_norm.weight": family.token_norm,
        "hidden_norm.weight": family.hidden_norm,
        "norm.weight": family.norm,
    }
    weights = {ours: _pop(found, f"{theirs}.weight") for ours, theirs in vectors.items()}
    layer = {name.removeprefix(family.layer): found.pop(name) for name in list(found)}
    biased, normed = layer.keys() >= BIASES, layer.keys() >= OPTIONAL
    for ours, theirs in PARTS.items():
        if normed or f"{theirs}.weight" not in OPTIONAL:
            weights[f"layer.{ours}.weight"] = _pop(layer, f"{theirs}.weight")
    products = {name: [_pop(layer, f"{part}.weight") for part in parts] for name, parts in PRODUCTS.items()}
    qkv, settings = products["qkv_proj"], _layer_sizes(products, weights, target)
    biases = [_pop(layer, f"{part}.bias") for part in PRODUCTS["qkv_proj"]] if biased else []
    if layer:
        raise UserError(
            f"drafter=mtp: {len(layer)} tensors of the MTP head are not supported, {min(layer)} first"
        )
    if settings["gate"]:
        qkv[0], weights["layer.gate_proj.weight"] = _split_gate(qkv[0], settings["heads"])
        if biases:
            raise UserError("drafter=mtp: an MTP head with both output gate and bias is not supported")
    for name, parts in products.items():
        weights[f"layer.{name}.weight"] = torch.cat(parts)
    if biases and any(bias.any() for bias in biases):  # a zero bias is only there for an engine
        weights["layer.qkv_proj.bias"] = torch.cat(biases)
    settings |= {"qkv_bias": "layer.qkv_proj.bias" in weights, "qk_norm": normed}
    if weights["fc.weight"].shape != (size, 2 * size):
        raise UserError(f"drafter=mtp: the MTP head is of another size than the target's {size}")
    return MtpHead(kind, settings, weights)


def native(weights: Mapping[str, Tensor], settings: Mapping[str, Any], layers: int) -> dict[str, Tensor]:
    """The inverse of `read`: a head under the names of its family, or MiMo's for a new head.

    Args:
        weights: by the drafter's names.
        settings: of the drafter.
        layers: number of layers of the target.
    """
    family = FAMILIES[settings["family"] or "mimo"]
    names = {name: f"{family.layer}{theirs}" for name, theirs in PARTS.items()}
    names = {f"layer.{name}": theirs for name, theirs in names.items()}
    names |= {"fc": family.fc, "norm": family.norm}
    names |= {"token_norm": family.token_norm, "hidden_norm": family.hidden_norm}
    tensors = {}
    for name, weight in weights.items():
        stem, _, end = name.rpartition(".")
        if stem in names:
            tensors[f"{names[stem]}.{end}"] = weight
    queries, keys = (settings[name] * settings["head_dim"] for name in ("heads", "kv_heads"))
    for end in ("weight", "bias"):
        if (joined := weights.get(f"layer.qkv_proj.{end}")) is not None:
            parts = list(joined.split([queries, keys, keys]))
            if settings["gate"]:
                gate = weights["layer.gate_proj.weight"]
                pair = [part.unflatten(0, (settings["heads"], -1)) for part in (parts[0], gate)]
                parts[0] = torch.stack(pair, 1).flatten(0, 2)
            theirs = zip(PRODUCTS["qkv_proj"], parts, strict=True)
            tensors |= {f"{family.layer}{part}.{end}": value for part, value in theirs}
    gate_up = zip(PRODUCTS["gate_up_proj"], weights["layer.gate_up_proj.weight"].chunk(2), strict=True)
    tensors |= {f"{family.layer}{part}.weight": value for part, value in gate_up}
    return {family.prefix.format(n=layers) + name: value for name, value in tensors.items()}


def _pop(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UserError(f"drafter=mtp: the MTP head has no {name}")
    return tensors.pop(name)


def _split_gate(weight: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(heads * 2 * dim, D), queries and gate of each head in turn -> queries and gates."""
    query, gate = weight.unflatten(0, (heads, 2, -1)).unbind(1)
    return query.flatten(0, 1), gate.flatten(0, 1)


def _layer_sizes(
    products: Mapping[str, list[Tensor]], weights: Mapping[str, Tensor], target: Target
) -> dict[str, Any]:
    q, k, _ = products["qkv_proj"]
    heads = target.config.num_attention_heads
    width = weights["layer.o_proj.weight"].shape[1]  # of attention's output
    dim = width // heads
    if len(q) not in (width, 2 * width) or width % heads or len(k) % dim:
        raise UserError(f"drafter=mtp: the MTP head's attention does not have the target's {heads} heads")
    return {
        "heads": heads,
        "kv_heads": len(k) // dim,
        "head_dim": dim,
        "intermediate_size": len(products["gate_up_proj"][0]),
        "gate": len(q) == 2 * width,
    }


# -- files -----------------------------------------------------------------------------------------


def read_file(target: Target, path: str | None) -> MtpHead | None:
    """The MTP head in a checkpoint's safetensors files; opens only the files that contain it.

    Args:
        target: the head's target.
        path: folder or hub id; None: the target's own.

    Returns:
        None: there is no head.

    Raises:
        UserError: see `read`; a path without such a head.
    """
    name = path or target.model.name_or_path
    if not name:
        return None  # a target built in memory
    revision = None if path else getattr(target.model.config, "_commit_hash", None)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not is_hub_id(name):
            raise UserError(f"drafter.path={name}: no such folder")
        folder = download.snapshot(name, revision, (INDEX, WHOLE))
    files = _tensor_files(folder)
    kind, own = find(files, target)
    if not kind:
        if path:
            raise UserError(f"drafter.path={path}: no MTP head in its safetensors files")
        return None
    wanted = {full: files[full] for full in own.values()}
    if not all((folder / file).is_file() for file in wanted.values()):
        folder = download.snapshot(name, revision, sorted(set(wanted.values())))
    tensors = {}
    for file in set(wanted.values()):
        header(folder / file)  # validates size and location
        with safe_open(folder / file, "pt") as opened:
            tensors |= {full: opened.get_tensor(full) for full, home in wanted.items() if home == file}
    return read(tensors, target)


def _tensor_files(folder: Path) -> dict[str, str]:
    """File of every tensor of a checkpoint; empty without safetensors."""
    if (folder / INDEX).is_file():
        files = read_json(folder / INDEX)["weight_map"]
        if not all(map(is_file_name, files.values())):
            raise UserError(f"{folder / INDEX}: names files outside its folder")
        return files
    return dict.fromkeys(header(folder / WHOLE), WHOLE) if (folder / WHOLE).is_file() else {}


# -- the target's final norm -----------------------------------------------------------------------


class FinalNorm(NamedTuple):
    """A target's final norm, x -> scale * x / rms(x).

    Attributes:
        scale: (D,).
        zero_centred: whether its weight, and those in the MTP head, are scale - 1 (Gemma, Qwen3-Next).
    """

    scale: Tensor
    zero_centred: bool


@torch.no_grad()
def final_norm(target: Target) -> FinalNorm | None:
    """The target's final norm; None: it has no final RMS norm."""
    parents = (module for module in target.base.modules() if target.layers in module.children())
    norm: Any = next((getattr(parent, "norm", None) for parent in parents), None)
    if not isinstance(norm, nn.Module):
        return None
    # Measured on inputs: classes store the weight of the same norm differently, or on another device.
    ones = torch.ones(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
    slope = torch.linspace(LARGE, 4 * LARGE, target.hidden_size).to(ones)[None, None]
    scale, sloped = (norm(x)[0, 0].to(target.device).float() for x in (LARGE * ones, slope))
    unit = slope[0, 0].float() / slope.float().square().mean().sqrt()
    if not torch.allclose(sloped, unit * scale, rtol=0.05, atol=1e-3):
        return None
    weight = getattr(norm, "weight", None)
    close = (
        weight is not None
        and not weight.is_meta
        and torch.allclose(weight.to(scale) + 1, scale, rtol=1e-2, atol=1e-3)
    )
    return FinalNorm(norm(LARGE * ones)[0, 0].to(target.device), bool(close))

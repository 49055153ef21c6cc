"""Rotary position settings of a target: base, scaling for long contexts, rotated share of a head."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.errors import UserError

DEFAULT_THETA = 10_000.0
SCALINGS = ("linear", "llama3", "yarn")  # their angles do not depend on the text's length
IGNORED = ("rope_theta", "type", "mrope_section")  # not scaling settings; text has one position per token


def rope_settings(config: Any) -> tuple[float, dict[str, Any] | None]:
    """Base of the wavelengths and scaling settings (None without scaling) of a target's positions.

    If layer types differ, the settings of full attention. Scaling that depends on the text's length is
    omitted with a warning: a drafter that is trained without it needs none.

    Args:
        config: a target's transformers 5 config, or the dictionary of a `config.json` of any version.
    """
    parameters = _parameters(config)
    theta = float(parameters.get("rope_theta") or DEFAULT_THETA)
    rope = {k: v for k, v in parameters.items() if k not in IGNORED and v is not None}
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind in SCALINGS:
        if kind == "yarn" and "factor" not in rope:  # in DeepSeek's configs
            rope["factor"] = (
                _get(config, "max_position_embeddings") / rope["original_max_position_embeddings"]
            )
        return theta, rope
    if kind not in ("default", "mrope"):
        warnings.warn(f"the drafter omits the scaling of the target's positions ({kind})", stacklevel=2)
    return theta, None if part == 1.0 else {"rope_type": "default", "partial_rotary_factor": part}


def _parameters(config: Any) -> dict[str, Any]:
    """Rope parameters of full attention as a flat dictionary with the keys of transformers 5."""
    parameters = dict(_get(config, "rope_parameters") or _get(config, "rope_scaling") or {})
    for kind in ("full_attention", "sliding_attention"):
        if isinstance(parameters.get(kind), dict):
            parameters = dict(parameters[kind])
    if "rope_type" not in parameters and "type" in parameters:
        parameters["rope_type"] = parameters["type"]
    for name in ("rope_theta", "partial_rotary_factor"):
        parameters.setdefault(name, _get(config, name))
    if parameters.get("rope_type") in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", _get(config, "max_position_embeddings"))
    return parameters


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def frequencies(dim: int, theta: float, rope: Mapping[str, Any] | None, like: Tensor) -> tuple[Tensor, float]:
    """(n,) inverse frequencies in radians per position, and the scale of cosines and sines.

    2 n of the `dim` elements of a head are rotated.

    Args:
        dim: size of one head.
        theta: base.
        rope: from `rope_settings`.
        like: a tensor on the device.

    Raises:
        UserError: an unknown type of scaling, or invalid numbers for it.
    """
    try:
        return _frequencies(dim, theta, rope or {}, like)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"settings.rope={rope}: {message}") from None


def _frequencies(dim: int, theta: float, rope: Mapping[str, Any], like: Tensor) -> tuple[Tensor, float]:
    kind, rotary_dim = rope.get("rope_type", "default"), int(dim * rope.get("partial_rotary_factor", 1.0))
    if kind == "default":
        steps = torch.arange(0, rotary_dim, 2, device=like.device, dtype=torch.float64)
        return theta ** (-steps / rotary_dim), 1.0
    if kind not in SCALINGS:
        raise UserError(f"settings.rope: rope_type {kind!r} is not known; known are {', '.join(SCALINGS)}")
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=rope.get("original_max_position_embeddings", 1),
        rope_parameters={"rope_theta": theta, **rope},
    )
    inverse_frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, like.device)
    return inverse_frequencies.double(), float(scale)

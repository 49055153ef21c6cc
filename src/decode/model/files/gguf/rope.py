"""Rotary positions of a GGUF file: its keys and factors as transformers' `rope_parameters`.

Both sides are implemented: what llama.cpp computes from the file (`frequencies`, after `ggml_rope_ext` and
`llama-context.cpp`, b11549), and parameters from which transformers must compute the same. The caller
compares the two in the loaded model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from decode.errors import UserError
from decode.model.files.gguf.header import Header

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
BASE = 10_000.0  # llama.cpp's default
BETA_FAST, BETA_SLOW = 32.0, 1.0
# llama.cpp's defaults; other values need a place in `rope_parameters`.
UNSET = {
    "scaling.yarn_ext_factor": (1.0, -1.0),
    "scaling.yarn_log_multiplier": (0.0,),
    "scaling.alpha": (0.0,),
}
USED = {
    "dimension_count",
    "freq_base",
    "freq_base_swa",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.attn_factor",
    "scaling.finetuned",
    "scaling.yarn_attn_factor",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
}


class Rotation(NamedTuple):
    """Rotation of positions in one kind of layer.

    Attributes:
        parameters: for `rope_parameters` of a configuration.
        frequencies: radians per position for each pair of dimensions, as in llama.cpp; float64.
        scale: factor of the rotated values.
    """

    parameters: dict[str, Any]
    frequencies: np.ndarray
    scale: float


class Rope:
    """Rotary settings of a file.

    Attributes:
        keys: names of the keys read, without the architecture.
        tensors: names of the factor tensors read.
    """

    def __init__(self, header: Header, head_size: int, context: int) -> None:
        """Args are the header, the size of a head and the context length."""
        prefix = f"{header.architecture}.rope."
        self.values = {
            key.removeprefix(prefix): value for key, value in header.keys.items() if key.startswith(prefix)
        }
        self.keys = {
            name for name, value in self.values.items() if name in USED or value in UNSET.get(name, ())
        }
        self.tensors = {name for name in (FACTORS, LONG, SHORT) if name in header.tensors}
        self.head_size, self.context = head_size, context
        self.width = self.values.get("dimension_count", head_size)
        if not 0 < self.width <= head_size or self.width % 2:
            raise UserError(f"{prefix}dimension_count is {self.width}, of {head_size} dimensions of a head")
        self.factors = {name: header.tensors[name].values().ravel() for name in self.tensors}
        for name, factors in self.factors.items():
            if factors.shape != (self.width // 2,) or not np.isfinite(factors).all() or (factors <= 0).any():
                raise UserError(f"{name} does not have {self.width // 2} factors above 0")

    def sections(self) -> list[int]:
        """Dimensions by kind of position; empty for models with one kind."""
        return [int(size) for size in self.values.get("dimension_sections", ()) if size]

    def everywhere(self) -> Rotation:
        """Rotation in all layers, or in those with full attention."""
        base = self._positive("freq_base", BASE)
        kind = self.values.get("scaling.type", "linear")
        factor = self._positive("scaling.factor", self._positive("scale_linear", 1.0, zero=1.0), zero=1.0)
        if LONG in self.factors or SHORT in self.factors:
            return self._longrope(base)
        if FACTORS in self.factors:
            if kind not in ("linear", "none") or (kind == "linear" and factor != 1.0):
                raise UserError(f"{FACTORS} and scaling of type {kind!r} at once are not read here")
            return self._by_factors(base)
        if kind == "yarn" and factor != 1.0:
            return self._yarn(base, factor)
        if self._positive("scaling.attn_factor", 1.0) != 1.0:
            raise UserError(f"rope.scaling.attn_factor with scaling of type {kind!r} is not read here")
        if kind == "none" or (kind in ("linear", "yarn") and factor == 1.0):
            return self._plain(base)
        if kind == "linear":
            plain = self._plain(base)
            scaled = plain.parameters | {"rope_type": "linear", "factor": factor}
            return Rotation(scaled, plain.frequencies / factor, 1.0)
        raise UserError(f"scaling of positions of type {kind!r} is not read here")

    def in_windows(self) -> Rotation:
        """Rotation in sliding-window layers, where it has separate settings."""
        return self._plain(self._positive("freq_base_swa", BASE))

    def _plain(self, base: float) -> Rotation:
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
        if self.width != self.head_size:
            parameters["partial_rotary_factor"] = self.width / self.head_size
        return Rotation(parameters, base ** -(np.arange(0, self.width, 2) / self.width), 1.0)

    def _yarn(self, base: float, factor: float) -> Rotation:
        original = int(self._positive("scaling.original_context_length", self.context))
        usual = 1.0 + 0.1 * math.log(factor)
        # llama.cpp b11549 ignores these when it scales positions; older ones and transformers use them.
        agreed = {"yarn_attn_factor": usual, "yarn_beta_fast": BETA_FAST, "yarn_beta_slow": BETA_SLOW}
        for name, value in agreed.items():
            own = self._positive(f"scaling.{name}", value)
            if not math.isclose(own, value, rel_tol=1e-6):
                raise UserError(
                    f"rope.scaling.{name} is {own:g}, and programs differ about any but {value:g}"
                )
        scale = usual * self._positive("scaling.attn_factor", 1.0)
        plain = self._plain(base)
        # ggml_rope_yarn_corr_dims: dimensions that turn `fast` and `slow` times in the original context.
        turns = [
            self.width * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))
            for beta in (BETA_FAST, BETA_SLOW)
        ]
        low, high = max(0, math.floor(turns[0])), min(self.width - 1, math.ceil(turns[1]))
        ramp = np.clip((np.arange(self.width // 2) - low) / max(0.001, high - low), 0, 1)
        frequencies = plain.frequencies * (1 - ramp + ramp / factor)
        parameters = plain.parameters | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": scale,
        }
        return Rotation(parameters, frequencies, scale)

    def _longrope(self, base: float) -> Rotation:
        if not {LONG, SHORT} <= self.tensors:
            raise UserError(f"it has only one of {LONG} and {SHORT}; give a file with both")
        if "scaling.original_context_length" not in self.values:
            raise UserError(f"it has {LONG} and no rope.scaling.original_context_length")
        scale = self._positive("scaling.attn_factor", 1.0)
        plain = self._plain(base)
        original = int(self._positive("scaling.original_context_length", self.context))
        parameters = plain.parameters | {
            "rope_type": "longrope",
            "factor": self.context / original,
            "short_factor": [float(str(value)) for value in self.factors[SHORT]],
            "long_factor": [float(str(value)) for value in self.factors[LONG]],
            "original_max_position_embeddings": original,
            "attention_factor": scale,
        }
        return Rotation(parameters, plain.frequencies / self.factors[SHORT], scale)

    def _by_factors(self, base: float) -> Rotation:
        """Llama 3's scaling, derived from its factors."""
        plain = self._plain(base)
        factors = self.factors[FACTORS].astype(np.float64)
        frequencies = plain.frequencies / factors
        if (factors == 1).all():
            return plain._replace(frequencies=frequencies)
        for guess in _llama3(factors, plain.frequencies, self.context):
            if np.allclose(_llama3_factors(plain.frequencies, *guess), factors, rtol=1e-5, atol=0):
                names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                scaled = dict(zip(names, guess, strict=True)) | {"rope_type": "llama3"}
                return Rotation(plain.parameters | scaled, frequencies, 1.0)
        raise UserError(f"{FACTORS} are not of Llama 3's scaling")

    def _positive(self, name: str, default: float, zero: float | None = None) -> float:
        """Number of a key; `zero` is what 0 stands for."""
        value = self.values.get(name, default)
        if value == 0 and zero is not None:
            return zero
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"rope.{name} is {value}, not a number above 0")
        return float(value)


def _llama3_factors(
    frequencies: np.ndarray, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Llama 3.1's divisors of frequencies (`generate_extra_tensors` of llama.cpp's converter)."""
    turns = original * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3(
    factors: np.ndarray, frequencies: np.ndarray, context: int
) -> Iterator[tuple[float, float, float, int]]:
    """Parameters that may have produced these factors: factor, low, high, original length.

    Between two wavelengths, 1/factor is linear in the frequency. Only the ratios of both wavelengths to the
    original length count, so the lower is taken as 1, as in all known models. Two points of the line
    determine them; with fewer points, the usual lengths are tried.
    """
    factor = float(str(np.float32(factors.max())))
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = np.flatnonzero((smooth > 1e-4) & (smooth < 1 - 1e-4))
    if len(between) > 1:
        first, last = between[0], between[-1]
        slope = (smooth[first] - smooth[last]) / (frequencies[first] - frequencies[last])
        start = float(frequencies[last] - smooth[last] / slope)
        original = 2 * math.pi / start
        high = float(start + 1 / slope) / start
        for digits in range(4):
            yield factor, 1.0, round(high, digits), round(original)
        return
    lengths = {context, round(context / factor), *(2**power for power in range(5, 21))}
    for high, original in product((4.0, 2.0, 8.0, 16.0, 32.0), sorted(lengths)):
        yield factor, 1.0, high, original

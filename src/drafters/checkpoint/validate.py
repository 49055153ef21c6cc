"""Validate settings and tensors of untrusted checkpoints before anything is built from them.

Nothing here allocates memory, imports modules or opens paths that an untrusted file names.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch.nn.modules import module as hooks

from decode.errors import UserError
from decode.model.target import Target
from drafters.base import Drafter
from drafters.hf.build import BASE, DOWN, UP
from drafters.hub.untrusted_files import Shape, brief, in_hub_cache, is_hub_id, shape_of
from drafters.layers.decoder_layer import LayerShape
from drafters.registry import drafter_class, nested

MAX_INT = 2**24  # of an integer in settings: above any vocabulary or context
MAX_FLOAT = 1e12  # of any other number in settings
# Upper bounds of integers that shapes on file do not limit: work per token, or parts of a text.
MOST = {
    **dict.fromkeys(("depth", "steps", "ensemble", "columns", "pool", "nodes", "candidates"), 1024),
    **dict.fromkeys(("ngram", "longest", "min_n", "max_n", "first_depth", "least"), 256),
    "anchors": 2**16,
}
PLACES = ("sinks", "recent", "places", "refresh", "queries")  # bounded by the target's context
MIN_PLACES = 4096  # allowed for any target
TOKEN_IDS = ("mask_id", "mask_token")
MAX_LENGTH = 2**16  # of a list or string in settings
MAX_PARTS = 5_000  # modules, weights and buffers of a drafter without tensors on file
TOKENS = ("d2t", "hot", "place", "rows", "tokens")  # buffers of token ids, or -1
RESERVED = re.compile(r"_.*_")  # keys such as `_target_` that other programs may execute


# -- settings --------------------------------------------------------------------------------------


def setting_names(kind: type[Drafter]) -> set[str]:
    """Names of a constructor's settings."""
    return set(_hints(kind))


def check_settings(kind: type[Drafter], settings: Mapping[str, Any]) -> None:
    """Check names, types and sizes of settings against a constructor.

    Raises:
        UserError: names the first invalid setting.
    """
    hints = _hints(kind)
    for name, value in settings.items():
        if name not in hints:
            raise UserError(f"settings.{brief(name)}: a {kind.__name__} has no such setting")
        if not _has_type(value, hints[name]):
            raise UserError(f"settings.{name}={brief(value)}: of the wrong type")
        _check_sizes(f"settings.{name}", value)
    for _, part, options in nested(settings):
        check_settings(drafter_class(part), options)


def check_target(settings: Mapping[str, Any], target: Target) -> None:
    """Check the vocabulary size, which shapes on file do not always determine.

    Raises:
        UserError: it differs from the target's.
    """
    if (size := settings.get("vocab_size", target.vocab_size)) != target.vocab_size:
        raise UserError(f"settings.vocab_size={size}: the target has {target.vocab_size} tokens")
    for *_, options in nested(settings):
        check_target(options, target)


def check_bounds(settings: Mapping[str, Any], target: Target) -> None:
    """Check numbers that shapes on file do not limit, before they are used.

    Raises:
        UserError: a number is negative, or larger than useful for the target.
    """
    context = max(target.max_positions or 0, MIN_PLACES)
    own = settings.get("config")  # of a whole model as drafter: its mask may be an additional token
    size = own.get("vocab_size") if isinstance(own, Mapping) else None
    tokens = max(target.vocab_size, size if isinstance(size, int) else 0)
    most = MOST | dict.fromkeys(PLACES, context) | dict.fromkeys(TOKEN_IDS, tokens - 1)
    for name, value in settings.items():
        if isinstance(value, Mapping) and name != "config":  # in transformers' configs, -1 is no token
            check_bounds(value, target)
        if type(value) is int and not 0 <= value <= most.get(name, MAX_INT):
            raise UserError(
                f"settings.{name}={value}: must be from 0 to {most.get(name, MAX_INT)} for this target"
            )


def check_base(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check the path of the base model of adapters.

    Raises:
        UserError: a relative path, or a local folder in a downloaded checkpoint.
    """
    base = settings.get("base")
    path = base.get("path") if isinstance(base, dict) else None
    if path is None:
        return
    if not isinstance(path, str) or not (Path(path).is_absolute() or is_hub_id(path)) or ".." in path:
        raise UserError(
            f"damaged checkpoint (settings.base.path={brief(path)}: neither a hub id nor an absolute folder)"
        )
    if in_hub_cache(folder) and not is_hub_id(path):
        raise UserError(
            f"settings.base.path={brief(path)}: its adapters need a model in a folder of the machine that "
            "they were trained on; ask for a checkpoint with the adapters merged"
        )


def _hints(kind: type) -> dict[str, Any]:
    """Types of a constructor's arguments, including **options (the parent's) and **sizes (`LayerShape`)."""
    types: dict[str, Any] = {}
    for parent in kind.__mro__:
        if "__init__" not in parent.__dict__:
            continue
        hints = get_type_hints(parent.__init__)
        parameters = inspect.signature(parent.__init__).parameters.values()
        types = {p.name: hints.get(p.name, Any) for p in parameters if p.kind != p.VAR_KEYWORD} | types
        rest = next((p.name for p in parameters if p.kind == p.VAR_KEYWORD), "")
        if rest == "sizes":
            types |= get_type_hints(LayerShape)
        if rest != "options":
            break
    types.pop("self", None)
    return types


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the annotated type."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, part) for part in parts)
    if hint is float:
        return type(value) in (int, float)
    if hint in (bool, int, str, NoneType):
        return type(value) is hint
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(_has_type(part, parts[1]) for part in value.values())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(_has_type(part, parts[0]) for part in value)
    return False


def _check_sizes(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            if RESERVED.fullmatch(key):
                raise UserError(f"{name}.{brief(key)}: a reserved key, which no drafter writes")
            _check_sizes(f"{name}.{brief(key)}", part)
    elif isinstance(value, list):
        for part in value[:MAX_LENGTH]:
            _check_sizes(name, part)
    large_int = (
        type(value) is int and abs(value) > MAX_INT and "theta" not in name
    )  # a wavelength allocates no memory
    large_float = type(value) is float and not abs(value) <= MAX_FLOAT
    if large_int or large_float or (isinstance(value, list | str) and len(value) > MAX_LENGTH):
        raise UserError(f"{name}={brief(value)}: larger than in any drafter")


# -- shapes ----------------------------------------------------------------------------------------


def check_shapes(
    kind: type[Drafter], settings: Mapping[str, Any], confidence: bool, shapes: Mapping[str, Shape]
) -> None:
    """Compare shapes on file with the tensors that settings imply, built on the `meta` device.

    Args:
        kind: class of the drafter.
        settings: from `check_settings`.
        confidence: whether it has a confidence head.
        shapes: of the tensors on file, by the drafter's names.

    Raises:
        UserError: the settings are invalid, or tensors do not match them.
    """
    empty = _empty(kind, settings, confidence, MAX_PARTS + 8 * len(shapes))
    expected = {name: shape_of(value) for name, value in empty.state_dict().items()}
    for name, shape in shapes.items():
        if name.endswith((DOWN, UP)) and name not in expected:
            _check_adapter(name, shape, shapes, expected)
        elif (expected_shape := expected.get(name.replace(f"{BASE}.", "."))) != shape:
            expectation = (
                f"config.json implies {expected_shape}"
                if expected_shape
                else "config.json implies no such tensor"
            )
            raise UserError(f"damaged checkpoint (tensor {brief(name)} is {shape}, {expectation})")
    names = {name.replace(f"{BASE}.", ".") for name in shapes}
    first = {id(value): name for name, value in reversed(empty.state_dict(keep_vars=True).items())}
    tied = {name for name, value in empty.state_dict(keep_vars=True).items() if first[id(value)] in names}
    stem = "model." if settings.get("base") else None  # prefix of the base model's weights
    missing = [n for n in expected if n not in names | tied and not (stem and n.startswith(stem))]
    if missing:
        raise UserError(f"damaged checkpoint ({len(missing)} tensors are missing, {brief(missing[0])} first)")


def _check_adapter(
    name: str, shape: Shape, shapes: Mapping[str, Shape], expected: Mapping[str, Shape]
) -> None:
    """Check that both factors of an adapter have the same rank and fit their weight."""
    stem = name.removesuffix(DOWN).removesuffix(UP)
    down, up, weight = shapes.get(stem + DOWN), shapes.get(stem + UP), expected.get(f"{stem}.weight")
    sizes = [part.size if part and part.kind == "float" else () for part in (down, up, weight)]
    (rank, wide_in), (wide_out, other) = (size if len(size) == 2 else (0, -1) for size in sizes[:2])
    if rank != other or sorted(sizes[2]) != sorted((wide_in, wide_out)):
        raise UserError(f"damaged checkpoint (adapter {brief(name)} is {shape}, which fits no weight)")


def _empty(kind: type[Drafter], settings: Mapping[str, Any], confidence: bool, parts: int) -> Drafter:
    try:
        with torch.device("meta"), _limit_parts(parts):
            drafter = kind(**settings)
            if confidence:
                drafter.add_confidence()
    except UserError:
        raise
    except Exception as error:  # invalid settings may fail anywhere in a constructor
        raise UserError(f"damaged checkpoint (settings make no {kind.__name__}: {brief(error)})") from None
    return drafter


@contextmanager
def _limit_parts(parts: int) -> Iterator[None]:
    """Limit the number of modules, weights and buffers that this thread creates."""
    thread, left = threading.get_ident(), parts

    def count(module: Any, name: str, part: Any) -> None:
        nonlocal left
        del module, name, part
        left -= threading.get_ident() == thread
        if left < 0:
            raise UserError(f"damaged checkpoint (its settings ask for more than {parts} parts)")

    registered = [
        hooks.register_module_module_registration_hook(count),
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in registered:
            hook.remove()


def check_values(drafter: Drafter, vocab_size: int) -> None:
    """Check that weights are finite and token ids exist in the target.

    Raises:
        UserError: names the first invalid tensor.
    """
    for name, value in drafter.named_parameters():
        if not value.isfinite().all():
            raise UserError(f"damaged checkpoint ({name} is not finite)")
    for name, value in drafter.named_buffers():
        if value.is_floating_point() and value.isnan().any():
            raise UserError(f"damaged checkpoint ({name} is not finite)")
        outside = name.rpartition(".")[2] in TOKENS and value.numel()
        if outside and not -1 <= int(value.min()) <= int(value.max()) < vocab_size:
            raise UserError(f"damaged checkpoint ({name} contains tokens that the target does not have)")

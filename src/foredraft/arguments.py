"""Arguments of the Python interface: their types, and how tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict
from weakref import WeakKeyDictionary, WeakSet

from transformers import PreTrainedModel

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.text_generation import Model
from drafters.base import Drafter

_fitting: WeakKeyDictionary[Drafter, WeakSet[Target]] = WeakKeyDictionary()  # pairs that were compared


class Decoding(TypedDict, total=False):
    """Options of `generate` and `stream`."""

    plan: Plan | str | None
    do_sample: bool | None
    temperature: float | None
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    stop: str | Sequence[str]
    seed: int


def sampler(
    do_sample: bool | None,
    temperature: float | None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Sampler:
    """How tokens are drawn: greedily unless a temperature or do_sample is given.

    Raises:
        UserError: a number out of range, or one without an effect because nothing is drawn.
    """
    if do_sample not in (None, True, False):
        raise UserError(f"do_sample={do_sample!r}: give True, False or None"[:200])
    if do_sample is True and temperature == 0:
        raise UserError("do_sample=True with temperature=0: nothing is drawn at 0; leave one of them out")
    if temperature is None:
        temperature = 1.0 if do_sample else 0.0
    drawn = {
        "temperature": (temperature, 0.0),
        "top_k": (top_k, 0),
        "top_p": (top_p, 1.0),
        "min_p": (min_p, 0.0),
    }
    made = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
    unused = [name for name, (value, default) in drawn.items() if value != default]
    if unused and (do_sample is False or made.temperature == 0):
        name = unused[0]
        raise UserError(
            f"{name}={drawn[name][0]:g}: greedy decoding draws nothing; give temperature= or do_sample=True"
        )
    return made


def check_target(target: Any) -> None:
    """Check that it was loaded.

    Raises:
        UserError: a name, a model of transformers, or something else.
    """
    if isinstance(target, Model):
        return
    if isinstance(target, str):
        raise UserError(f"target: load it first: target = foredraft.load_target({target!r})"[:200])
    if isinstance(target, PreTrainedModel):
        raise UserError(
            f"target: a {type(target).__name__}: wrap it first: target = foredraft.load_target(model)"
        )
    raise UserError(f"target: give what foredraft.load_target returns, not {type(target).__name__}")


def check_drafter(drafter: Any, target: Target | None = None, optional: bool = True) -> None:
    """Check that it was loaded, and for this target.

    Raises:
        UserError: a name or something else, or None where one is needed; a drafter of another target, on
            another device or in another dtype.
    """
    if drafter is None and optional:
        return
    if not isinstance(drafter, Drafter):
        raise UserError(
            f"drafter: give one from foredraft.load_drafter(checkpoint, target), not {type(drafter).__name__}"
        )
    if target is not None:
        check_fit(drafter, target)


def check_fit(drafter: Drafter, target: Target) -> None:
    """Check that a drafter was made for a target; its weights are compared once.

    A drafter of another target would draft without a match, or with another vocabulary.

    Raises:
        UserError: a drafter of another target, on another device or in another dtype.
    """
    again = "load it for this target: foredraft.load_drafter(checkpoint, target)"
    where = next(((p.device, p.dtype) for p in drafter.parameters()), None)
    if where and where != (target.device, target.dtype):
        raise UserError(
            f"drafter: it is on {where[0]} in {where[1]}, and the target on {target.device} in "
            f"{target.dtype}; {again}"
        )
    known = _fitting.setdefault(drafter, WeakSet())
    if target in known:
        return
    origin = drafter.origin
    if origin is not None and origin.fingerprint != target.fingerprint():
        raise UserError(
            f"drafter: it was made for target {origin.name or '(unnamed)'!r}, with other weights or another "
            f"vocabulary; {again}"
        )
    known.add(target)

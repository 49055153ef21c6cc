"""Arguments of the Python interface: their types, and how tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from transformers import PreTrainedModel

from decode.errors import UserError
from decode.plan import Plan
from decode.sampling import Sampler
from distill.text_generation import Model
from drafters.base import Drafter


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


def check_drafter(drafter: Any, optional: bool = True) -> None:
    """Check that it was loaded.

    Raises:
        UserError: a name or something else, or None where one is needed.
    """
    if isinstance(drafter, Drafter) or (drafter is None and optional):
        return
    raise UserError(
        f"drafter: give one from foredraft.load_drafter(checkpoint, target), not {type(drafter).__name__}"
    )

"""How much of a loop's rounds is captured: all, verification, or nothing. A line says what is not."""

from __future__ import annotations

import torch

from decode.generation.capture.rows import CapturedRows, Setup, WholeRows
from decode.generation.capture.state import NotCapturedError
from decode.generation.capture.verification import RunningTexts
from decode.generation.capture.verified_rows import VerifiedRows
from decode.generation.types import Observes
from decode.rng import KeyedCoin

HALF = (torch.bfloat16, torch.float16)  # in which compiled rounds win on a CPU; see docs/speed.md


def captured_rows(
    setup: Setup, name: str, texts: RunningTexts, rows: int, coin: KeyedCoin
) -> CapturedRows | None:
    """Move rows into captured rounds.

    Args:
        setup: of the loop.
        name: of the drafter, or of the target without one.
        texts: the rows, after their prefill.
        rows: most rows at a time.
        coin: of the next round.

    Returns:
        The rows; None: their rounds cannot be captured.
    """
    say, drafter, target = setup.captures.say, setup.drafter, texts.target
    if target.compiles and target.device.type == "cpu" and target.dtype not in HALF:
        say(
            f"decoding is not captured: on a CPU rounds in {str(target.dtype).removeprefix('torch.')} are "
            "slower than compiled passes; set target.compile=false"
        )
        return None
    try:
        return _whole(setup, texts, rows)
    except NotCapturedError as error:
        reason = f"{name} {error}"
    if drafter is None:
        say(f"decoding is not captured: {reason}")
        return None
    if drafter.traits.reads_cache or drafter.traits.drafts_in_verification:
        say(f"decoding is not captured: {reason}, and drafts from the target's cache")
        return None
    try:
        found = VerifiedRows(setup, drafter, texts, rows, coin)
    except NotCapturedError as error:
        say(f"decoding is not captured: verification {error}")
        return None
    say(f"verification is captured, drafting is not: {reason}")
    return found


def _whole(setup: Setup, texts: RunningTexts, rows: int) -> WholeRows:
    """Rows in rounds that are captured whole.

    Raises:
        NotCapturedError: the draft cannot be captured, or nothing can.
    """
    if setup.plan.adapt is not None:
        raise NotCapturedError("drafts lengths that decode.adapt chooses on the host")
    if isinstance(setup.drafter, Observes):
        raise NotCapturedError("reads the target's answers on the host")
    key = setup.drafter, setup.plan, setup.sampler
    return setup.captures.attempt(key, lambda: WholeRows(setup, texts, rows))

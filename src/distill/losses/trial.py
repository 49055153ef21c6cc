"""Call a divergence once on made-up rows, before a run starts work: a mistake in it is one line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from decode.errors import UserError
from distill.losses.chunked_logits import Student, TargetProbs, Teacher
from distill.losses.divergences import Divergence, by_autograd

ROWS, VOCABULARY = 4, 16


def check_divergence(divergence: Divergence) -> None:
    """Call a divergence with its options on a few rows.

    Args:
        divergence: of conf/objective, or of an installed package; with its options.

    Raises:
        UserError: it fails, or returns other things than values and gradients.
    """
    function = getattr(divergence, "func", divergence)  # of functools.partial
    try:
        result = divergence(*_rows())
    except UserError:
        raise
    except Exception as error:  # code of others
        if _works_by_autograd(divergence):
            raise _undecorated(function) from None
        raise _error(function, f"{type(error).__name__}: {error} ({_place(error)})") from None
    if isinstance(result, Tensor) and _works_by_autograd(divergence):
        raise _undecorated(function)
    expected = (ROWS,), (ROWS, VOCABULARY)
    if _shapes(result) != expected:
        raise _error(
            function,
            f"must return (M,) values and (M, V') gradients; for M={ROWS} and V'={VOCABULARY} it returned "
            f"{_described(result)}",
        )


def _rows() -> tuple[Student, Teacher]:
    """Rows without a miss; each call has new tensors, since divergences overwrite the student's."""
    draws = torch.Generator().manual_seed(0)
    logits, drafted = torch.randn(2, ROWS, VOCABULARY, generator=draws).unbind()
    text_ids = torch.arange(ROWS)
    p, q = logits.softmax(-1), drafted.softmax(-1)
    probs = TargetProbs(logits, p, logits.logsumexp(-1), logits.argmax(-1), None, text_ids)
    alpha = torch.minimum(p, q).sum(-1)
    student = Student(drafted, q, drafted.logsumexp(-1), drafted.argmax(-1), alpha)
    return student, Teacher(probs, slice(None))


def _works_by_autograd(divergence: Divergence) -> bool:
    """Whether it is a function of log_q, which lacks the decorator."""
    if isinstance(getattr(divergence, "func", divergence), by_autograd):
        return False
    try:
        by_autograd(cast(Any, divergence))(*_rows())
    except Exception:  # code of others
        return False
    return True


def _undecorated(function: Any) -> UserError:
    name = _name(function)
    return _error(
        function,
        f"it computes values from log_q, and its gradients are missing; write @by_autograd above def {name} "
        "(from distill.losses.divergences import by_autograd)",
    )


def _error(function: Any, reason: str) -> UserError:
    return UserError(f"objective {_name(function)}: {' '.join(reason.split())}")


def _name(function: Any) -> str:
    function = function.values if isinstance(function, by_autograd) else function
    return getattr(function, "__name__", type(function).__name__)


def _place(error: Exception) -> str:
    """File and line of the innermost frame that is neither ours nor torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_library(frame.filename)] or frames
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}"


def _is_library(file: str) -> bool:
    ours, torchs = Path(__file__).parents[2], Path(torch.__file__).parent
    return any(Path(file).is_relative_to(place) for place in (ours, torchs))


def _shapes(result: Any) -> tuple[tuple[int, ...], ...] | None:
    if isinstance(result, tuple) and all(isinstance(part, Tensor) for part in result):
        return tuple(tuple(part.shape) for part in result)
    return None


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(map(_described, result))})"
    return f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__

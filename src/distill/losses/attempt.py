"""Compiled code with a fallback for machines that cannot compile it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distill.utils.progress import say

T = TypeVar("T")


class Attempt:
    """Runs compiled code, or the same uncompiled if the first attempt fails.

    Args:
        name: begins the line that says so.

    Attributes:
        works: None before the first attempt.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.works: bool | None = None

    def __call__(self, compiled: Callable[[], T], eager: Callable[[], T]) -> T:
        """Return the result of `compiled`, or of `eager` once the first `compiled` has failed.

        Raises:
            Exception: `compiled` fails after it has worked.
        """
        if self.works is False:
            return eager()
        try:
            result = compiled()
        except Exception as error:  # missing or broken compilers raise any type
            if self.works:
                raise
            self.works = False
            reason = str(error).strip().split("\n")[0]
            say(f"{self._name}: {type(error).__name__}: {reason}; continuing without compilation")
            return eager()
        self.works = True
        return result

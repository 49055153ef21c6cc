"""What a rule is told of the drafts that it will verify."""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """The part of `decode.plan.Plan` that rules look at; see there."""

    @property
    def depth(self) -> int:
        """Levels below the root."""
        ...

    @property
    def proposal(self) -> str:
        """Where tokens come from."""
        ...

    @property
    def drafts(self) -> int:
        """Chains side by side."""
        ...

    @property
    def tree(self) -> tuple[tuple[int, ...], ...]:
        """Paths of a static tree."""
        ...

    @property
    def replacement(self) -> bool:
        """Whether siblings are drawn with replacement."""
        ...

    @property
    def min_confidence(self) -> float:
        """Product of confidences at which a chain ends."""
        ...

    @property
    def has_siblings(self) -> bool:
        """Whether a node may have several children."""
        ...

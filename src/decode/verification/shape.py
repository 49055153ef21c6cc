"""Properties of a plan that rules depend on."""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """The part of `decode.plan.Plan` that rules use; see there."""

    @property
    def depth(self) -> int:
        """Levels below the root."""
        ...

    @property
    def proposal(self) -> str:
        """Source of the tokens."""
        ...

    @property
    def drafts(self) -> int:
        """Number of parallel chains."""
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
        """Product of confidences below which a chain ends."""
        ...

    @property
    def has_siblings(self) -> bool:
        """Whether a node may have several children."""
        ...

"""Progress of a store in answers: its whole shards, and the part of the shard that is being made."""

from __future__ import annotations

from typing import Self

from distill.rollouts.store import RolloutStore
from distill.utils.cpu_threads import fit_threads
from distill.utils.progress import Bar, bar


class AnswersBar:
    """Progress bar of a store; opened by `with`.

    Args:
        store: store with missing shards.
        what: name of the task.
        leave: see `Bar`.
    """

    def __init__(self, store: RolloutStore, what: str, leave: bool) -> None:
        plan, prompts = store.plan, len(store.prompts)
        self.store, self.what, self.leave = store, what, leave
        self.total = prompts * plan.samples + plan.self_prompts
        self._shard = self.total / store.shards  # answers of one, on average
        self._missing, self._bar = len(store.missing()), None

    def __enter__(self) -> Self:
        fit_threads()
        self._bar: Bar | None = bar(self.total, self.what, "answers", self._answers(0.0), self.leave)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.close()

    def shards(self, missing: int, note: str | None = None) -> None:
        """Show that so many shards are missing."""
        self._missing = missing
        self._show(0.0, note)

    def part(self, share: float) -> None:
        """Show that this share of another shard is made."""
        self._show(share, None)

    def _answers(self, share: float) -> int:
        return self.total - round(self._shard * max(0.0, self._missing - share))

    def _show(self, share: float, note: str | None) -> None:
        fit_threads()
        if self._bar and ((more := self._answers(share) - self._bar.n) or note):
            self._bar.update(more, note)

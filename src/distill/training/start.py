"""What a drafter has before its first training step: another's weights, and counts of the rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from decode.errors import UserError
from decode.model.target import Target
from distill.rollouts.store import RolloutStore
from distill.utils.progress import bar, say
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.registry import short_name
from drafters.vocabulary import TokenCounts


@dataclass(frozen=True)
class WarmStart:
    """Starts a drafter from the weights of another.

    Args:
        source: drafter.init_from: a checkpoint's folder or a hub id; None: the drafter stays as it is.
    """

    source: str | None

    def load(self, drafter: Drafter, target: Target) -> bool:
        """Copy the weights; returns whether they include everything that `Drafter.fit` counts.

        Raises:
            UserError: the drafter has no weights to train, or see `checkpoint_io.warm_start`.
        """
        if not self.source:
            return False
        if not drafter.trains:
            raise UserError(f"drafter.init_from={self.source}: this drafter has no weights to train")
        missing = checkpoint_io.warm_start(drafter, checkpoint_io.fetch(self.source), target)
        taken = f"all but {', '.join(missing)}" if missing else "every tensor taken over"
        say(f"drafter.init_from={self.source}: {taken}")
        buffers = {name for name, _ in drafter.named_buffers()}
        return not any(name.split(" ")[0] in buffers for name in missing)


def fit_counts(drafter: Drafter, store: RolloutStore, target: Target, has_counts: bool) -> None:
    """Fit what takes no gradient, and choose the tokens that training scores.

    Args:
        drafter: to fit.
        store: rollouts that are counted.
        target: of the drafter.
        has_counts: a warm start took the counts over, with the draft vocabulary; they stay.
    """
    if drafter.needs_fit and not has_counts:
        name = f"drafter={short_name(drafter)}"
        with bar(1, f"fitting {name}", "steps", leave=False) as shown:

            def progress(done: int, total: int) -> None:
                shown.total = total
                shown.update(done - shown.n)

            line = drafter.fit(store.texts(), target, progress)
        say(f"{name}: {line}")
    elif drafter.d2t is not None:
        drafter.choose_scored(TokenCounts.of(store.texts(), target))

"""TensorBoard: curves, scorecards as text and histograms of accepted lengths, in a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from decode.evaluation.scorecard import Scorecard, read_scorecard
from distill.loggers.base import FailSafe, accepted_lengths, scalars, setting
from distill.scoring.tables import settings_table
from distill.utils.progress import say
from distill.utils.run_folder import best

FOLDER = "tensorboard"


class TensorBoard(FailSafe, TensorBoardLogger):
    """Logs to event files; readers show the newer value of steps that are repeated after a kill.

    Args:
        folder: folder of the run.
        first_step: first step of this process.
    """

    label = "TensorBoard"

    def __init__(self, folder: Path, first_step: int) -> None:
        options: dict[str, Any] = {"purge_step": first_step} if first_step else {}
        super().__init__(folder, name=FOLDER, version="", default_hp_metric=False, **options)
        self.first_step = first_step

    @rank_zero_only
    def begin(self) -> None:
        """Print the log folder; log the first step's score again, since readers purge that step."""
        folder = Path(self.save_dir)
        say(f"TensorBoard: tensorboard --logdir {self.log_dir}")
        checkpoint = folder / "checkpoints" / str(self.first_step)
        if (card := checkpoint / "score.json").exists():
            self._try("curves", lambda: self.log_metrics(scalars(read_scorecard(card)), self.first_step))
            self.saved(folder, checkpoint)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try("curves", lambda: super(TensorBoard, self).log_metrics(metrics, step))

    @override
    @rank_zero_only
    def save(self) -> None:
        self._try("curves", super().save)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._try("curves", lambda: super(TensorBoard, self).finalize(status))

    @rank_zero_only
    def saved(self, folder: Path, checkpoint: Path) -> None:
        """Log a checkpoint's scorecard and histograms."""
        if (card := checkpoint / "score.json").exists():
            self._try("scorecards", lambda: self._saved(read_scorecard(card), checkpoint == best(folder)))

    def _saved(self, card: Scorecard, is_best: bool) -> None:
        writer, step = self.experiment, card.checkpoint.step
        text = "\n".join(f"    {line}" for line in settings_table(card).splitlines())  # Markdown's verbatim
        writer.add_text("scorecard", f"{text}\n\nbest so far: {'yes' if is_best else 'no'}", step)
        for row in card.rows:
            counts = accepted_lengths(row)
            total = sum(counts)
            writer.add_histogram_raw(
                f"accepted_length/{setting(row)}",
                min=0,
                max=len(counts) - 1,
                num=total,
                sum=sum(j * count for j, count in enumerate(counts)),
                sum_squares=sum(j * j * count for j, count in enumerate(counts)),
                bucket_limits=[j + 0.5 for j in range(len(counts))],
                bucket_counts=counts,
                global_step=step,
            )
        writer.flush()

    def ended(self, folder: Path) -> None:
        """No-op: event files contain neither the report nor weights."""

"""The batch of a step that came to no number, kept for whoever wants to know why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from distill.data.batches import Micro
from distill.data.datamodule import served
from distill.utils.atomic_files import write_json
from distill.utils.run_folder import FAILED
from drafters.checkpoint.atomic import publish


class Watched:
    """The micro-batches of an optimizer step, held until it has turned out well.

    What the target says of them is not held: it is read again from the tokens.
    """

    def __init__(self) -> None:
        self._micros: list[Micro] = []

    def add(self, micro: Micro) -> None:
        """One more micro-batch of this step, as it is trained on."""
        self._micros.append(micro._replace(read=None))

    def clear(self) -> None:
        """The step is done."""
        self._micros.clear()

    def check(self, trainer: L.Trainer, loss: float, norm: float) -> None:
        """Stop a run whose numbers are none, and save what they were made of.

        Both numbers are the same on every rank, so all of them stop, and each saves its own batch.

        Args:
            trainer: of the run.
            loss: of the step.
            norm: of its gradient.

        Raises:
            UserError: loss or norm is not finite.
        """
        # In fp16 a gradient overflows now and then: the loss scaler skips the step and lowers its scale.
        scaled = str(trainer.precision).startswith("16")
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            return
        step, rank = self._micros[0].step, trainer.global_rank
        path = Path(trainer.default_root_dir) / FAILED / f"step-{step}-rank-{rank}.safetensors"
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        try:
            save(
                path, self._micros, served(trainer).batches.of(step).rows_of(step), loss=loss, grad_norm=norm
            )
            where = f"The batch is in {path}"
        except OSError as error:
            where = f"The batch could not be saved to {path} ({error.strerror})"
        raise UserError(
            f"training: {what} at step {step}; lower optimizer.lr, or look at the rollouts. {where}; "
            "the last checkpoint is untouched"
        )


def save(path: Path, micros: Sequence[Micro], rows: Sequence[Sequence[int]], **numbers: float) -> None:
    """Write micro-batches, and a JSON file beside them that says whose they are.

    Args:
        path: a safetensors file; tensors are named `<micro-batch>.<field>`.
        micros: of one step on one rank.
        rows: numbers of their rows in the store.
        numbers: what came of them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    about: list[dict[str, Any]] = []
    for i, (micro, own) in enumerate(zip(micros, rows, strict=True)):
        fields = {k: v for k, v in micro._asdict().items() if v is not None}
        tensors |= {f"{i}.{k}": v.cpu().contiguous() for k, v in fields.items() if isinstance(v, Tensor)}
        about.append({k: v for k, v in fields.items() if not isinstance(v, Tensor)} | {"rows": list(own)})
    # JSON has no word for nan.
    said = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    write_json(path.with_suffix(".json"), said | {"step": micros[0].step, "micro_batches": about})
    with publish(path) as temporary:
        save_file(tensors, temporary)


def load(path: Path) -> list[Micro]:
    """The micro-batches that `save` wrote; `DistillModule.training_step` takes them as they are."""
    tensors, about = load_file(path), json.loads(path.with_suffix(".json").read_text())["micro_batches"]
    micros = []
    for i, fields in enumerate(about):
        own = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{i}.")}
        micros.append(Micro(**own, **{k: v for k, v in fields.items() if k != "rows"}))
    return micros

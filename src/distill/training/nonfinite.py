"""Stop at a loss or gradient that is not finite, and save the batch for debugging."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from decode.generation.finite import check_states
from decode.model.target import Target
from distill.data.batches import MicroBatch
from distill.data.datamodule import rollout_data
from distill.utils.atomic_files import write_json
from distill.utils.run_folder import FAILED
from drafters.checkpoint.atomic import publish


class NonFiniteGuard:
    """Holds the micro-batches of an optimizer step until its loss and gradient norm are known to be finite.

    Hidden states of the target are not held; they can be computed again from the tokens.
    """

    def __init__(self) -> None:
        self._micros: list[MicroBatch] = []

    def add(self, micro: MicroBatch) -> None:
        """Hold a micro-batch of the current step."""
        self._micros.append(micro._replace(target_states=None))

    def clear(self) -> None:
        """Drop the micro-batches of a finished step."""
        self._micros.clear()

    def check(self, trainer: L.Trainer, loss: float, norm: float) -> None:
        """Stop the run if the loss or the gradient norm is not finite, and save the micro-batches.

        Both numbers are the same on every rank, so all ranks stop, and each saves its own batch.

        Args:
            trainer: of the run.
            loss: of the step.
            norm: of its gradient.

        Raises:
            UserError: loss or norm is not finite.
        """
        # fp16 gradients may overflow: the loss scaler then skips the step and lowers its scale.
        scaled = str(trainer.precision).startswith("16")
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            return
        step, rank = self._micros[0].step, trainer.global_rank
        advice = "lower optimizer.optimizer.lr, or look at the rollouts"
        if not step:  # no rate has been applied
            advice = "look at the objective and its options, at initial weights, and at the rollouts"
        cause = _target_fault(trainer, self._micros) or advice
        path = Path(trainer.default_root_dir) / FAILED / f"step-{step}-rank-{rank}.safetensors"
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        try:
            rows = rollout_data(trainer).batches.of(step).rows_of(step)
            save(path, self._micros, rows, loss=loss, grad_norm=norm)
            where = f"The batch is in {path}"
        except OSError as error:
            where = f"The batch could not be saved to {path} ({error.strerror})"
        raise UserError(f"training: {what} at step {step}; {cause}. {where}; checkpoints are untouched")


def _target_fault(trainer: L.Trainer, micros: Sequence[MicroBatch]) -> str:
    """What is wrong with the target's hidden states of a step; "" if they are finite.

    With several processes nothing is read again: those whose rows are fine would not take part.
    """
    target: Target = cast(Any, trainer.lightning_module).target
    if trainer.world_size > 1 or target.source:
        return ""
    for micro in micros:
        tokens = micro.tokens.to(target.device)
        try:
            states = target.read(tokens, micro.lengths).last
            check_states(target, states, tokens.tolist(), "a row of the step")
        except UserError as error:
            return str(error)
    return ""


def save(path: Path, micros: Sequence[MicroBatch], rows: Sequence[Sequence[int]], **numbers: float) -> None:
    """Write micro-batches as safetensors, with a JSON file of their rows and numbers next to them.

    Args:
        path: a safetensors file; tensors are named `<micro-batch>.<field>`.
        micros: of one step on one rank.
        rows: numbers of their rows in the store.
        numbers: loss and gradient norm.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    records: list[dict[str, Any]] = []
    for i, (micro, row_numbers) in enumerate(zip(micros, rows, strict=True)):
        fields = {k: v for k, v in micro._asdict().items() if v is not None}
        tensors |= {f"{i}.{k}": v.cpu().contiguous() for k, v in fields.items() if isinstance(v, Tensor)}
        scalars = {k: v for k, v in fields.items() if not isinstance(v, Tensor)}
        records.append(scalars | {"rows": list(row_numbers)})
    # JSON has no NaN.
    values = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    write_json(path.with_suffix(".json"), values | {"step": micros[0].step, "micro_batches": records})
    with publish(path) as temporary:
        save_file(tensors, temporary)


def load(path: Path) -> list[MicroBatch]:
    """The micro-batches that `save` wrote; `DistillModule.training_step` takes them as they are."""
    tensors, records = load_file(path), json.loads(path.with_suffix(".json").read_text())["micro_batches"]
    micros = []
    for i, fields in enumerate(records):
        batch = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{i}.")}
        micros.append(MicroBatch(**batch, **{k: v for k, v in fields.items() if k != "rows"}))
    return micros

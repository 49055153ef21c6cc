"""Training a small Llama chat model on packed text: data, optimizers and the LightningModule."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from typing_extensions import override

from decode.errors import UserError
from distill.data.batches import ResumeSampler
from distill.distributed.graceful_shutdown import Stop
from distill.distributed.ranks import write_processes
from distill.training.checkpointing import STATE
from distill.training.optim import CombinedOptimizer, warm_up_and_decay
from distill.utils.progress import say
from distill.utils.run_folder import checkpoints
from drafters.checkpoint.atomic import rename_into_place
from train_target.corpus import Document, pack


class Sequences(Dataset[Tensor]):
    """Batch m on rank r depends only on (seed, m, r, rows); every epoch is shuffled again."""

    def __init__(self, rows: np.ndarray, size: int, count: int, rank: int, world: int, seed: int) -> None:
        self.rows, self.size, self.count = rows, size, count
        self.rank, self.world, self.seed = rank, world, seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.count

    @override
    def __getitem__(self, index: int) -> Tensor:
        first = (index * self.world + self.rank) * self.size
        numbers = [self._row(place) for place in range(first, first + self.size)]
        return torch.from_numpy(self.rows[numbers]).long()  # (B, T)

    def _row(self, place: int) -> int:
        epoch, within = divmod(place, len(self.rows))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)))
        return int(self._order[1][within])


class TextData(L.LightningDataModule):
    """Packed text: all training documents together, held-out documents by file.

    Args:
        train: documents.
        held: documents.
        tokenizer: of the model.
        length: tokens of a sequence.
        batch_size: sequences of one micro-batch.
        seed: of the order.
    """

    def __init__(
        self,
        train: list[Document],
        held: list[Document],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.rows = pack(train, tokenizer, length)
        self.tokens = int((self.rows >= 0).sum())
        self.held: list[tuple[str, Tensor]] = []
        for source in sorted({document.source for document in held}):
            rows = pack([d for d in held if d.source == source], tokenizer, length)
            batches = torch.from_numpy(rows).long().split(batch_size)
            self.held += [(source, batch) for batch in batches]

    @override
    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None
        count = trainer.max_steps * trainer.accumulate_grad_batches
        batches = Sequences(
            self.rows, self.batch_size, count, trainer.global_rank, trainer.world_size, self.seed
        )
        # A resumed run continues at its batch; Lightning has already restored the step.
        start = trainer.global_step * trainer.accumulate_grad_batches
        return DataLoader(batches, batch_size=None, sampler=ResumeSampler(start, count))

    @override
    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held, batch_size=None)  # pyright: ignore[reportArgumentType]


MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
WARMUP, FINAL_LR = 0.03, 0.05  # share of the steps, share of the learning rate


class PretrainModule(L.LightningModule):
    """Next-token cross-entropy over all tokens of a sequence.

    Args:
        model: what is trained.
        text: hash of documents and tokenizer; a checkpoint continues only with the same.
        rate: factor of the learning rates.
    """

    def __init__(self, model: LlamaForCausalLM, text: str, rate: float = 1.0) -> None:
        super().__init__()
        self.model, self.text, self.rate = model, text, rate
        self.loss = math.nan  # of the newest micro-batch

    @override
    def forward(self, rows: Tensor) -> Tensor:
        """Mean nats per token."""
        # Padding is on the right, so causal attention needs no mask.
        return self.model(input_ids=rows.clamp(min=0), labels=rows, use_cache=False).loss

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One micro-batch."""
        loss = self(batch)
        self.loss = loss.item()
        if not math.isfinite(self.loss):
            raise UserError(
                f"training: the loss is {self.loss} at batch {batch_idx}; lower the learning rates"
            )
        self.log("train/loss", self.loss)
        return loss

    @override
    def validation_step(self, batch: tuple[str, Tensor], batch_idx: int) -> None:
        """A batch of one source; Lightning averages with the token counts as weights."""
        del batch_idx
        source, rows = batch
        loss, count = self(rows), int((rows[:, 1:] >= 0).sum())
        self.log(f"val/{source}", loss, batch_size=count)
        self.log("val/loss", loss, batch_size=count)

    @override
    def on_validation_epoch_end(self) -> None:
        """Print training and validation loss."""
        if self.trainer.state.fn == TrainerFn.FITTING:  # the finished model's is shown with its folder
            value = float(self.trainer.callback_metrics["val/loss"])
            say(f"step {self.trainer.global_step}: loss {self.loss:.3f}, held out {value:.3f}")

    def build_optimizer(self) -> CombinedOptimizer:
        """Muon for the hidden layers' matrices, AdamW for embeddings and norms."""
        hidden = {id(p) for p in self.model.model.layers.parameters() if p.ndim == 2}
        matrices = [p for p in self.parameters() if id(p) in hidden]
        others = [p for p in self.parameters() if id(p) not in hidden]
        muon, adamw = ({**settings, "lr": self.rate * settings["lr"]} for settings in (MUON, ADAMW))
        return CombinedOptimizer([torch.optim.Muon(matrices, **muon), torch.optim.AdamW(others, **adamw)])

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """A linear warm-up, then a cosine."""
        optimizer = self.build_optimizer()
        schedule = warm_up_and_decay(optimizer, self.trainer.max_steps, WARMUP, FINAL_LR)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["text"] = self.text

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["text"] != self.text:
            raise UserError("data: the text has changed since this run began; start another: resume=never")


class Saver(L.Callback):
    """Saves checkpoints atomically, and keeps the newest."""

    def __init__(self, folder: Path, every: int, stop: Stop) -> None:
        self.folder, self.every, self.stop = folder, every, stop
        self._step = 0  # last finished step

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        final = self.folder / "checkpoints" / str(step)
        if step == self._step:  # a micro-batch of the next step
            return
        self._step = step
        self.stop.synchronize(trainer)
        due = step % self.every == 0 or step == trainer.max_steps
        if (due or self.stop.signal_name) and not final.exists():
            self._save(trainer, final)
        if self.stop.signal_name:
            self.stop.exit(step)

    def _save(self, trainer: L.Trainer, final: Path) -> None:
        temporary = final.with_name(f"{final.name}.tmp")
        (temporary / STATE.parent).mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(temporary / STATE)
        write_processes(trainer, temporary / STATE.parent)
        if trainer.is_global_zero:
            rename_into_place(temporary, final)
            for older in checkpoints(self.folder)[:-1]:
                shutil.rmtree(older)

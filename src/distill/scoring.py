"""Scoring a checkpoint folder as the configuration asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from decode.load import stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from decode.score import Setting, score
from decode.target import Target
from distill.progress import bar
from distill.provenance import commit
from drafters import hub


class Scorer:
    """Loads a checkpoint as a user would, and scores it.

    Args:
        cfg: with `score`, `decode`, `target` and `seed`.
        target: to decode with; its taps are set to what the checkpoint reads.
        prompts: token ids of held-out prompts.
    """

    def __init__(self, cfg: DictConfig, target: Target, prompts: Sequence[Sequence[int]]) -> None:
        self.cfg, self.target, self.prompts = cfg, target, list(prompts)
        plans = [instantiate(cfg.decode), *(Plan(**plan) for plan in cfg.score.plans)]
        self.settings = [
            Setting(Sampler(temperature), plan, batch)
            for temperature in cfg.score.temperatures
            for batch in cfg.score.batch_sizes
            for plan in plans
        ]

    def __call__(self, folder: Path, step: int) -> dict[str, Any]:
        """The scorecard of one checkpoint."""
        options = self.cfg.score
        drafter = hub.load(folder, self.target)
        self.target.tap(drafter.taps)
        with _threads(options.threads), bar(1, f"scoring step {step}", "batches", leave=False) as shown:

            def progress(done: int, total: int) -> None:
                shown.total = total
                shown.update(done - shown.n)

            card = score(
                self.target,
                drafter,
                self.prompts,
                self.settings,
                max_new_tokens=options.max_new_tokens,
                stop=stop_tokens(self.target),
                seed=self.cfg.seed,
                repeats=options.repeats,
                audit_prompts=options.audit_prompts,
                progress=progress,
            )
        return card | {
            "step": step,
            "commit": commit(),
            "target": self.cfg.target.path,
            "drafter": hub.short_name(drafter),
            "parameters": hub.parameters(drafter),
        }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Time on `count` CPU threads; two spin against each other at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

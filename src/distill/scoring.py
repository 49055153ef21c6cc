"""Scoring a checkpoint folder as the configuration asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from decode.auto import Auto
from decode.errors import UserError
from decode.load import stop_tokens
from decode.plan import Plan
from decode.replay import Rollout
from decode.sampling import Sampler
from decode.score import Setting, check, score
from decode.target import Target
from distill.heldout import held_out_answers
from distill.progress import bar
from distill.prompts import Chat, Prompt
from distill.provenance import commit
from drafters import hub
from drafters.base import Drafter


class Scorer:
    """Loads a checkpoint as a user would, and scores it.

    Args:
        cfg: with `score`, `decode`, `target` and `seed`.
        target: to decode with; its taps are set to what the checkpoint reads.
        chat: renders the prompts.
        prompts: held out: the first `score.prompts` are decoded, `score.replay_prompts` replayed.
        rollouts: folder in which the target's answers to them are kept.

    Raises:
        UserError: a headline that is not lossless, or `decode=auto` with nothing to measure it on.
    """

    def __init__(
        self, cfg: DictConfig, target: Target, chat: Chat, prompts: Sequence[Prompt], rollouts: Path
    ) -> None:
        self.cfg, self.target, self.chat, self.root = cfg, target, chat, rollouts
        options = cfg.score
        self.replayed = list(prompts[: options.replay_prompts])
        self.prompts = list(prompts[: options.prompts])
        self.ids = [chat.encode(p.messages) for p in self.prompts]
        self.plans: list[Plan | Auto] = [instantiate(cfg.decode), *(Plan(**plan) for plan in options.plans)]
        if isinstance(self.plans[0], Auto) and not self.replayed:
            raise UserError("decode=auto measures acceptance on replayed prompts; raise score.replay_prompts")
        if isinstance(self.plans[0], Plan):
            check(self.ids, self.plans[0])
        warpers = ("top_k", "top_p", "min_p", "repetition_penalty")
        self.samplers = [
            Sampler(t, **{name: options[name] for name in warpers}) for t in options.temperatures
        ]
        self.rollouts: dict[Sampler, list[Rollout]] = {}

    @property
    def candidates(self) -> list[Plan]:
        """Every plan that a checkpoint may be scored with."""
        plans = [plan.plans if isinstance(plan, Auto) else [plan] for plan in self.plans]
        return [plan for group in plans for plan in group]  # pyright: ignore[reportReturnType]

    def prepare(self) -> None:
        """Have the target answer the held-out prompts once at every law; later runs read the answers."""
        if self.replayed and not self.rollouts:
            new = self.cfg.score.max_new_tokens
            self.rollouts = {
                sampler: held_out_answers(
                    self.target, self.chat, self.replayed, sampler, new, self.cfg.seed, self.root
                )
                for sampler in self.samplers
            }

    def __call__(self, folder: Path, step: int) -> dict[str, Any]:
        """The scorecard of one checkpoint."""
        options = self.cfg.score
        drafter = hub.load(folder, self.target)
        self.target.tap(drafter.taps)
        self.prepare()
        with threads(options.threads), bar(1, f"scoring step {step}", "batches", leave=False) as shown:

            def progress(done: int, total: int) -> None:
                shown.total = total
                shown.update(done - shown.n)

            settings, curves = self._settings(drafter)
            card = score(
                self.target,
                drafter,
                self.ids,
                settings,
                max_new_tokens=options.max_new_tokens,
                stop=stop_tokens(self.target),
                seed=self.cfg.seed,
                repeats=options.repeats,
                audit_prompts=options.audit_prompts,
                full_audit=OmegaConf.select(self.cfg, "audit") == "full",  # a training run has no such key
                names=[p.id for p in self.prompts],
                rollouts=self.rollouts,
                progress=progress,
            )
        return card | {
            "auto": curves,
            "step": step,
            "commit": commit(),
            "target": self.cfg.target.path,
            "drafter": hub.short_name(drafter),
            "parameters": hub.parameters(drafter),
            "drafter_kv_bytes_per_token": self._kv_bytes(drafter),
        }

    @torch.inference_mode()
    def _kv_bytes(self, drafter: Drafter) -> int:
        """Of a drafter that has read one token."""
        token = torch.tensor([self.ids[0][:1]], device=self.target.device)  # (1, 1)
        state = drafter.new_state(1)
        drafter.advance(state, self.target, token, self.target.read(token).taps, [1], token[:, 0])
        return drafter.kv_bytes_per_token(state)

    def _settings(self, drafter: Drafter) -> tuple[list[Setting], list[dict[str, Any]]]:
        """All rows of the scorecard; `decode=auto` is settled for each law and batch size."""
        settings, curves = [], []
        for sampler in self.samplers:
            for batch in self.cfg.score.batch_sizes:
                for plan in self.plans:
                    if isinstance(plan, Auto):
                        options = {
                            "max_new_tokens": self.cfg.score.max_new_tokens,
                            "stop": stop_tokens(self.target),
                            "seed": self.cfg.seed,
                        }
                        answers = self.rollouts[sampler]
                        plan, curve = plan.choose(self.target, drafter, answers, sampler, batch, **options)
                        curves.append(
                            {"temperature": sampler.temperature, "batch_size": batch, "chosen": plan.name}
                            | {"curve": curve}
                        )
                    settings.append(Setting(sampler, plan, batch))
        return list(dict.fromkeys(settings)), curves


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Time on `count` CPU threads; two spin against each other at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

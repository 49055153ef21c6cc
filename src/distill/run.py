"""From a composed configuration to a trained, scored drafter."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import lightning as L
import transformers
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from decode.errors import UserError
from decode.load import load_config, load_target, load_tokenizer, stop_tokens
from decode.target import Target
from distill.callbacks import STATE, ScoreCheckpoint
from distill.data import RolloutData
from distill.estimate import estimate
from distill.module import DistillModule
from distill.objectives import Objective
from distill.prompts import Chat, Prompt, held_out, read_prompts, split
from distill.provenance import digest, local
from distill.report import table
from distill.rollouts import RolloutPlan, RolloutStore, Writer
from distill.runs import checkpoints
from distill.scoring import Scorer

OmegaConf.register_new_resolver(
    "device_of", lambda accelerator: "cuda" if accelerator in ("gpu", "cuda") else "cpu", replace=True
)


def run(cfg: DictConfig, folder: Path) -> float:
    """Rollouts, training, scores.

    Args:
        cfg: composed from conf/config.yaml.
        folder: of this run; checkpoints and logs are written below it.

    Returns:
        tau of the best checkpoint, 0 if nothing was scored.

    Raises:
        UserError: bad input; it is found before any work starts, and nothing is left behind.
    """
    quiet()
    chat, train, held = read_inputs(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    target = build_target(cfg)
    try:
        drafter = instantiate(cfg.drafter)(target)
        objective = Objective(instantiate(cfg.objective), instantiate(cfg.weights))
        scorer = Scorer(cfg, target, [chat.encode(p.messages) for p in held]) if cfg.score.enabled else None
    except TypeError as error:
        raise UserError(f"configuration: {error}") from None
    target.tap(drafter.taps)

    plan = _rollout_plan(cfg, target, chat, train)
    store = RolloutStore(Path(cfg.output_dir) / "rollouts", plan, train)
    writer = Writer(target, chat, plan, stop_tokens(target))
    print(estimate(store, target, drafter), flush=True)
    _roll_out(store, writer)

    files = [store.path(i) for i in range(store.shards)]
    data = RolloutData(files, store.folder / "cache", cfg.batch_size, cfg.max_tokens, cfg.seed)
    optimizer = instantiate(cfg.optimizer.optimizer)
    module = DistillModule(
        target, drafter, objective, optimizer, cfg.optimizer.warmup, cfg.optimizer.final_lr
    )
    saver = ScoreCheckpoint(folder, cfg.score.every, scorer, cfg.target.path)
    trainer: L.Trainer = instantiate(
        cfg.trainer, callbacks=[saver], logger=_loggers(cfg, folder), default_root_dir=str(folder)
    )
    newest = next((c for c in reversed(checkpoints(folder)) if (c / STATE).exists()), None)
    data.first_step = int(newest.name) if newest else 0
    if newest:
        print(f"resuming from step {newest.name}", flush=True)
    state = {"ckpt_path": str(newest / STATE), "weights_only": True} if newest else {}
    trainer.fit(module, data, **state)
    if trainer.interrupted or trainer.global_step < trainer.max_steps:
        raise KeyboardInterrupt
    return _finish(trainer, folder)


def quiet() -> None:
    """Leave the terminal to what a user asked to see."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("WANDB_SILENT", "true")


def read_inputs(cfg: DictConfig) -> tuple[Chat, list[Prompt], list[Prompt]]:
    """Check the target's configuration and read tokenizer and prompts: cheap, so it comes first.

    Returns:
        The chat template, training prompts and the held-out prompts that are scored.
    """
    path = str(local(cfg.target.path))
    load_config(path, cfg.target.revision, cfg.target.trust_remote_code)
    tokenizer = load_tokenizer(path, cfg.target.revision, cfg.target.trust_remote_code)
    chat = Chat(tokenizer, cfg.prompts.template)
    given = read_prompts(local(cfg.prompts.path)) if cfg.prompts.path else []
    if cfg.prompts.heldout:
        train, held = held_out(given, read_prompts(local(cfg.prompts.heldout)))
    else:
        train, held = split(given, cfg.prompts.heldout_share)
    if cfg.score.enabled and not held:
        raise UserError(
            "prompts: none are held out for scoring; raise prompts.heldout_share, set prompts.heldout "
            "to a file, or score.enabled=false"
        )
    return chat, train, held[: cfg.score.prompts]


def build_target(cfg: DictConfig) -> Target:
    """Load and probe the target that cfg.target names."""
    options = {k: v for k, v in cfg.target.items() if k != "path"}
    return load_target(str(local(cfg.target.path)), **options)


def _rollout_plan(cfg: DictConfig, target: Target, chat: Chat, prompts: list[Prompt]) -> RolloutPlan:
    rollout = cfg.rollout
    return RolloutPlan(
        target=target.fingerprint(),
        tokenizer=digest(json.dumps(chat.tokenizer.get_vocab(), sort_keys=True) + str(chat.tokenizer.chat_template)),
        template=cfg.prompts.template,
        answers=rollout.answers,
        prompts=digest(json.dumps(prompts)),
        self_prompts=cfg.prompts.self,
        sampler={"temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p},
        prompt_sampler={"temperature": rollout.prompt_temperature},
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        shard_size=rollout.shard_size,
        seed=cfg.seed,
    )


def _roll_out(store: RolloutStore, writer: Writer) -> None:
    missing = len(store.missing())
    if not missing:
        print(f"rollouts: reusing all {store.shards} shards in {store.folder}", flush=True)
        return
    if missing < store.shards:
        print(f"rollouts: {store.shards - missing} of {store.shards} shards are there already", flush=True)
    with tqdm(total=store.shards, initial=store.shards - missing, desc="rollouts", unit="shard") as bar:
        store.fill(writer, bar.update)
    shards = store.manifest()["shards"]
    rows, answered = sum(s["rows"] for s in shards), sum(s["answered"] for s in shards)
    print(f"rollouts: {rows} rows, {answered} supervised tokens in {store.folder}", flush=True)


def _loggers(cfg: DictConfig, folder: Path) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(folder, name="csv", version="")]
    if cfg.logger.wandb:
        settled = "WANDB_MODE" in os.environ
        offline = not settled and "WANDB_API_KEY" not in os.environ
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        name = f"{folder.parent.name}/{folder.name}"
        loggers.append(
            WandbLogger(name, save_dir=folder, offline=offline, project=cfg.logger.project, config=config)
        )
    return loggers


def _finish(trainer: L.Trainer, folder: Path) -> float:
    if not trainer.is_global_zero:
        return 0.0
    print(table(folder), flush=True)
    best = folder / "checkpoints" / "best" / "score.json"
    return float(json.loads(best.read_text())["tau"]) if best.exists() else 0.0

"""The target and its tokenizer, as a configuration names them."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from decode.model.causal_lm import max_positions
from decode.model.load import load_config, load_target, load_tokenizer
from decode.model.probe import check_packing
from decode.model.target import Target
from distill.prompts import split as inputs
from distill.prompts.chat_template import Chat
from distill.prompts.length import Limit, strictest
from distill.prompts.prompt import Prompt
from distill.utils.paths import bundled
from distill.utils.progress import bar
from drafters.base import Drafter

OF_ANY = ("init_from", "confidence")  # settings of cfg.drafter that every drafter has


def read_chat(cfg: DictConfig, template: str | None = None) -> Chat:
    """Check the target's configuration and read its tokenizer; a `template` comes before the configured."""
    path = str(bundled(cfg.target.path))
    load_config(path, cfg.target.revision, cfg.target.trust_remote_code)
    tokenizer = load_tokenizer(path, cfg.target.revision, cfg.target.trust_remote_code)
    options: Any = cfg.prompts.template_options
    if options is not None:
        if not OmegaConf.is_dict(options):
            raise UserError(
                f"prompts.template_options={options}: write it as {{name: value}}, as in "
                "{enable_thinking: false}"
            )
        options = OmegaConf.to_container(options, resolve=True)
    return Chat(tokenizer, template or cfg.prompts.template, options)


def read_limit(cfg: DictConfig) -> Limit:
    """Tokens of the longest prompt that is used; of the target its configuration alone is read."""
    config = load_config(str(bundled(cfg.target.path)), cfg.target.revision, cfg.target.trust_remote_code)
    return strictest(
        cfg.prompts.max_tokens, OmegaConf.select(cfg, "max_tokens"), max_positions(config.get_text_config())
    )


def build_target(cfg: DictConfig, device: torch.device | None = None) -> Target:
    """Load and probe the target that cfg.target names.

    Args:
        cfg: with `target`.
        device: of this process, one of several; None: the one that cfg.target names.
    """
    target = cfg.target
    with bar(1, f"loading target {target.path}", "", leave=False):
        loaded = load_target(
            str(bundled(target.path)),
            target.dtype,
            str(device or target.device),
            target.revision,
            target.trust_remote_code,
            target.compile,
            target.placement,
            max_memory=target.max_memory,
            offload_folder=target.offload_folder,
        )
    if OmegaConf.select(cfg, "packing"):
        check_packing(loaded)
    return loaded


def quiet() -> None:
    """Leave the terminal to what a user asked to see."""
    datasets.disable_progress_bars()
    for module in (r"lightning\.", r"torch\.distributed\."):  # what DeepSpeed calls is about to be renamed
        warnings.filterwarnings("ignore", module=module)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("WANDB_SILENT", "true")


def read_inputs(cfg: DictConfig, folder: Path | None = None) -> tuple[Chat, list[Prompt], list[Prompt]]:
    """Check the target's configuration and read tokenizer and prompts: cheap, so it comes first.

    Args:
        cfg: with `target`, `prompts` and `score`.
        folder: of a run, where the prompts are written down.

    Returns:
        The chat template, training prompts and the held-out prompts that are scored, these with one
        place to answer each.
    """
    chat = read_chat(cfg)
    given = bool(OmegaConf.select(cfg, "rollout.answers") == "given")
    found = inputs.read(cfg, chat, read_limit(cfg), given)
    if cfg.score.enabled and not found.held:
        raise UserError(
            "prompts: none are held out for scoring; raise prompts.heldout_share, set prompts.heldout "
            "to a file, or score.enabled=false"
        )
    if folder:
        inputs.keep_record(found, folder)
    inputs.describe(found, folder)
    return chat, found.train, found.held[: max(cfg.score.prompts, cfg.score.replay_prompts)]


def build_drafter(cfg: DictConfig, target: Target) -> Drafter:
    """The drafter that cfg.drafter names; a `path` in it is meant as the target's is."""
    where = {"path": str(bundled(cfg.drafter.path))} if cfg.drafter.get("path") else {}
    own = OmegaConf.masked_copy(cfg.drafter, [k for k in cfg.drafter if k not in OF_ANY])
    drafter = instantiate(own, **where)(target)
    if cfg.drafter.get("confidence"):
        drafter.add_confidence()
    return drafter

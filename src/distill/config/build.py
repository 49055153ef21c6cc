"""The target and its tokenizer, as a configuration names them."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from decode.model.causal_lm import max_positions
from decode.model.load import load_config, load_target, load_tokenizer
from decode.model.probe import check_packing
from decode.model.target import Target
from distill.prompts.chat_template import Chat
from distill.prompts.length import Limit, strictest
from distill.utils.progress import bar
from distill.utils.provenance import local


def read_chat(cfg: DictConfig, template: str | None = None) -> Chat:
    """Check the target's configuration and read its tokenizer; a `template` comes before the configured."""
    path = str(local(cfg.target.path))
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
    config = load_config(str(local(cfg.target.path)), cfg.target.revision, cfg.target.trust_remote_code)
    return strictest(cfg.prompts.max_tokens, OmegaConf.select(cfg, "max_tokens"), max_positions(config))


def build_target(cfg: DictConfig, device: torch.device | None = None) -> Target:
    """Load and probe the target that cfg.target names.

    Args:
        cfg: with `target`.
        device: of this process, one of several; None: the one that cfg.target names.
    """
    target = cfg.target
    with bar(1, f"loading target {target.path}", "", leave=False):
        loaded = load_target(
            str(local(target.path)),
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

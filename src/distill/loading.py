"""The target and its tokenizer, as a configuration names them."""

from __future__ import annotations

from omegaconf import DictConfig

from decode.load import load_config, load_target, load_tokenizer
from decode.target import Target
from distill.chat import Chat
from distill.provenance import local


def read_chat(cfg: DictConfig) -> Chat:
    """Check the target's configuration and read its tokenizer."""
    path = str(local(cfg.target.path))
    load_config(path, cfg.target.revision, cfg.target.trust_remote_code)
    tokenizer = load_tokenizer(path, cfg.target.revision, cfg.target.trust_remote_code)
    return Chat(tokenizer, cfg.prompts.template)


def build_target(cfg: DictConfig) -> Target:
    """Load and probe the target that cfg.target names."""
    target = cfg.target
    return load_target(
        str(local(target.path)),
        target.dtype,
        target.device,
        target.revision,
        target.trust_remote_code,
        target.compile,
    )

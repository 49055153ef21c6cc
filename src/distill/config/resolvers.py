"""Resolvers of ${...} in conf/, registered on import."""

from __future__ import annotations

from omegaconf import OmegaConf


def _device_of(accelerator: str) -> str:
    """Where a target lies when there is no trainer to say it."""
    if accelerator == "auto":
        import torch  # a second, which nobody else waits for

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator in ("gpu", "cuda") else "cpu"


OmegaConf.register_new_resolver("device_of", _device_of, replace=True)

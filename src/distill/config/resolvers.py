"""Resolvers of ${...} in conf/, registered on import."""

from __future__ import annotations

from omegaconf import OmegaConf


def device_of(accelerator: str) -> str:
    """Device type of an accelerator name."""
    if accelerator == "auto":
        import torch  # imported here: it takes a second

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator in ("gpu", "cuda") else "cpu"


OmegaConf.register_new_resolver("device_of", device_of, replace=True)

"""How a run made its drafter, from what it wrote down: its configuration, prompts and rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill.prompts.split import RECORD
from distill.rollouts.manifest import MANIFEST
from distill.utils.atomic_files import read_json

PARTS = ("drafter", "objective", "weights", "optimizer", "on_policy")
TRAINER = ("max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision", "devices", "strategy")
PLAIN = ("batch_size", "max_tokens", "seed")
ROLLOUTS = ("answers", "sampler", "max_prompt_tokens", "max_new_tokens", "self_prompts", "samples", "seed")


def recipe_of(checkpoint: Path) -> dict[str, Any] | None:
    """What the folders around a checkpoint say; None outside a run's folder.

    Folders of this machine are named by their last part.
    """
    folder = checkpoint.resolve().parent.parent
    config = folder / ".hydra" / "config.yaml"
    if checkpoint.resolve().parent.name != "checkpoints" or not config.is_file():
        return None
    cfg: Any = OmegaConf.to_container(OmegaConf.load(config), resolve=False)
    found = {part: _plain(cfg[part]) for part in PARTS if part in cfg}
    found["trainer"] = {name: cfg["trainer"][name] for name in TRAINER if name in cfg["trainer"]}
    found |= {name: cfg[name] for name in PLAIN if name in cfg}
    if prompts := read_json(folder / RECORD):
        found["prompts"] = _plain(prompts)
    if rollouts := _rollouts(folder, cfg):
        found["rollouts"] = rollouts
    return found


def _rollouts(folder: Path, cfg: dict[str, Any]) -> dict[str, Any] | None:
    """Law, counts and versions of the first store that it trained on."""
    began = read_json(folder / "rollouts.json")
    named = cfg["rollout"].get("store")
    if not began or (named and "://" in named):
        return {"store": began["store"]} if began else None
    manifest = read_json((Path(named) if named else _root(folder, cfg) / began["store"]) / MANIFEST)
    if not manifest:
        return {"store": began["store"]}
    plan = {name: manifest["plan"][name] for name in ROLLOUTS if name in manifest["plan"]}
    versions = {name: manifest[name] for name in ("versions", "counts") if name in manifest}
    return {"store": began["store"]} | plan | versions


def _root(folder: Path, cfg: dict[str, Any]) -> Path:
    """The rollouts of all runs: where the configuration has them, or beside a folder that was moved."""
    configured = Path(cfg["output_dir"]) / "rollouts"
    return configured if configured.is_dir() else folder.parent.parent / "rollouts"


def _plain(value: Any) -> Any:
    """Without what is unset, and without where things lie."""
    if isinstance(value, dict):
        kept = {
            k: _plain(v) for k, v in value.items() if v is not None and k not in ("_partial_", "_convert_")
        }
        if target := kept.pop("_target_", None):
            kept = {"is": target.rpartition(".")[0 if target.endswith(".for_target") else 2], **kept}
        return kept
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, str) and (value.startswith(("/", "~", ".")) or Path(value).is_file()):
        return Path(value).name
    return value

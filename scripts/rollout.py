"""Have the target answer prompts, and nothing else: python scripts/rollout.py prompts=<file> [overrides]."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def make(cfg: DictConfig, folder: Path) -> float:
    """Make a store of rollouts, or what is missing of it."""
    del folder
    from distill.commands.rollout import roll_out

    return roll_out(cfg)


if __name__ == "__main__":
    main(make, CONF, "rollout_alone")

"""Look at rollouts: python scripts/inspect_data.py store=outputs/rollouts/<name> [overrides]."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def look(cfg: DictConfig, folder: Path) -> float:
    """Print rows and statistics."""
    del folder
    from distill.commands.inspect_data import inspect

    return inspect(cfg)


if __name__ == "__main__":
    main(look, CONF, "inspect_data")

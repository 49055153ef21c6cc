"""The entropy limit of fixed trees: python scripts/limit.py [checkpoint=<folder>] [overrides]."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def task(cfg: DictConfig, folder: Path) -> float:
    """Seconds of imports that `--help` does not wait for."""
    del folder
    from distill.commands.limit import limits

    return limits(cfg)


if __name__ == "__main__":
    main(task, CONF, "limit")

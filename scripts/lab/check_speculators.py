"""Open an export with speculators: check_speculators.py python=<its> checkpoint=<folder>."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main
from distill.utils.paths import CONF


def task(cfg: DictConfig, folder: Path) -> float:
    """Seconds of imports that `--help` does not wait for."""
    del folder
    from benchmarks.check_speculators.check import check

    return check(cfg)


if __name__ == "__main__":
    main(task, CONF, "lab/check_speculators")

"""Is the served drafter the trained one? scripts/verify_served.py url=http://host:8000 checkpoint=..."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def task(cfg: DictConfig, folder: Path) -> float:
    """Exit code 0: the engine accepts what the scorecard says; 1: it does not; 2: it cannot be told."""
    del folder
    from distill.serving.verify import verify

    if not verify(cfg):
        raise SystemExit(1)
    return 0.0


if __name__ == "__main__":
    main(task, CONF, "verify_served")

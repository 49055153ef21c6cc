"""python train.py drafter=eagle -- compose the configuration and run it. No logic lives here."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main


def train(cfg: DictConfig, folder: Path) -> float:
    """Rollouts, training, scores; imported here, so that help and refusals do not wait for torch."""
    from distill.main import run

    return run(cfg, folder)


if __name__ == "__main__":
    main(train, Path(__file__).parent / "conf")

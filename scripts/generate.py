"""Answer a prompt: python scripts/generate.py prompt='How do I use grep?' checkpoint=<folder> [overrides]."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def generate(cfg: DictConfig, folder: Path) -> float:
    """Print the answer as it comes, and how fast it came."""
    del folder
    from distill.commands.generate import answer

    return answer(cfg)


if __name__ == "__main__":
    main(generate, CONF, "generate")

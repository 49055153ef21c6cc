"""Give a drafter away: python scripts/export.py checkpoint=<folder> to=vllm push_to=user/repo."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def task(cfg: DictConfig, folder: Path) -> float:
    """Seconds of imports that `--help` does not wait for."""
    del folder
    from distill.config.build import quiet
    from distill.export import export

    quiet()
    return export(cfg)


if __name__ == "__main__":
    main(task, CONF, "export")

"""Score a checkpoint folder again: python scripts/score.py checkpoint=<folder> [overrides]."""

from pathlib import Path

from omegaconf import DictConfig

from distill.cli.main import main

CONF = Path(__file__).resolve().parents[1] / "conf"


def rescore(cfg: DictConfig, folder: Path) -> float:
    """Print the table and, where `out` says so, write the scorecard."""
    del folder
    from distill.config.build import build_target, quiet, read_inputs
    from distill.config.validate import check_ranges
    from distill.report.compare import earlier
    from distill.report.tables import settings_table
    from distill.scoring.scorer import Scorer
    from distill.utils.atomic_files import write_json
    from drafters.checkpoint import io as hub

    quiet()
    check_ranges(cfg)
    chat, _, held = read_inputs(cfg)
    scorer = Scorer(cfg, build_target(cfg), chat, held, Path(cfg.answers))
    checkpoint = hub.fetch(cfg.checkpoint)
    known = earlier(checkpoint)
    card = scorer(checkpoint, known.get("step", 0)) | known
    if cfg.out:
        write_json(Path(cfg.out), card)
    print(settings_table(card))
    return float(card["tau"])


if __name__ == "__main__":
    main(rescore, CONF, "score_checkpoint")

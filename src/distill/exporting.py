"""scripts/export.py: a checkpoint in the files of another program."""

from __future__ import annotations

import shlex
from pathlib import Path

from omegaconf import DictConfig

from decode.errors import UserError
from distill.files import publish_folder
from distill.loading import build_target
from distill.progress import say
from distill.run import quiet
from drafters import hub
from drafters.export import table
from drafters.export.layout import Layout


def export(cfg: DictConfig) -> float:
    """Write the folder, and say how to serve it.

    Args:
        cfg: composed from conf/export.yaml.

    Returns:
        0: there is nothing to optimise.

    Raises:
        UserError: no checkpoint, a program that is not known or has no format for the drafter, a
            folder that is there already.
    """
    quiet()
    programs = list(table.WRITERS)
    if cfg.to not in programs:
        raise UserError(f"to={cfg.to}: choose {', '.join(programs[:-1])} or {programs[-1]}")
    checkpoint = hub.fetch(cfg.checkpoint)
    cfg.target.path = cfg.target.path or hub.made_for(checkpoint)
    out = Path(cfg.out) if cfg.out else _beside(checkpoint.resolve(), cfg.to)
    if out.exists():
        raise UserError(f"out={out} is there already; remove it, or choose another folder")
    target = build_target(cfg)
    layout = table.written(hub.opened(hub.load(checkpoint, target)), target, cfg.to)
    temporary = out.with_name(f"{out.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    layout.write(temporary)
    publish_folder(temporary, out)
    say("\n\n".join([str(out), *_advice(layout, cfg.target.path, str(out))]))
    return 0.0


def _advice(layout: Layout, target: str, drafter: str) -> list[str]:
    """The command, whatever is in the paths, and the note."""
    # Quoted word by word: a path may stand inside of a word, as in JSON.
    words = [word.format(target=target, drafter=drafter) for word in shlex.split(layout.serve)]
    command = [f"serve it: {shlex.join(words)}"] if words else []
    return command + ([layout.note] if layout.note else [])


def _beside(checkpoint: Path, to: str) -> Path:
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    return run / "export" / f"{checkpoint.name}-{to}" if run else Path(f"{checkpoint}-{to}")

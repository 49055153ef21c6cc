"""Which drafter goes into which program's files, and whose files become which drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.errors import UserError
from decode.target import Target
from drafters.export import block, speculators, speculators_reader
from drafters.export.layout import Layout, Reader, Saved, Writer

WRITERS: Mapping[str, Mapping[str, Writer]] = {  # by short name
    "vllm": {"dflash": block.vllm, "diffusion": block.departs},
    "sglang": {"dflash": block.sglang, "diffusion": block.departs},
    "speculators": {
        "dflash": speculators.dflash,
        "diffusion": block.departs,
        "eagle3": speculators.eagle3,
        "p_eagle": speculators.p_eagle,
    },
}
READERS: Sequence[Reader] = (speculators_reader.READER, block.READER)


def written(saved: Saved, target: Target, to: str) -> Layout:
    """A drafter's files for another program.

    Raises:
        UserError: it has none for this drafter, or cannot load it as it is.
    """
    if saved.drafter not in WRITERS[to]:
        where = [program for program, writers in WRITERS.items() if saved.drafter in writers]
        raise UserError(
            f"to={to}: {to} has no format for drafter {saved.drafter!r}; "
            f"set to={' or '.join([*where, 'native'])}"
        )
    return WRITERS[to][saved.drafter](saved, target)


def reader(config: Mapping[str, Any]) -> Reader | None:
    """Who knows files with this `config.json`; None: nobody."""
    return next((reader for reader in READERS if reader.knows(config)), None)

"""Which drafter goes into which program's files, and whose files become which drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.errors import UserError
from decode.target import Target
from drafters.export import block, eagle, eagle3, speculators, speculators_reader
from drafters.export.layout import Layout, Reader, Saved, Writer

# By short name.
WRITERS: Mapping[str, Mapping[str, Writer]] = {
    "vllm": {
        "dflash": block.vllm,
        "diffusion": block.departs,
        "eagle": eagle.to_vllm,
        "eagle3": eagle3.to_vllm,
    },
    "sglang": {
        "dflash": block.sglang,
        "diffusion": block.departs,
        "eagle": eagle.to_sglang,
        "eagle3": eagle3.to_sglang,
    },
    "speculators": {
        "dflash": speculators.dflash,
        "diffusion": block.departs,
        "eagle3": speculators.eagle3,
        "p_eagle": speculators.p_eagle,
    },
}
# The first that knows a file reads it: the likeliest to take another's for its own come last.
READERS: Sequence[Reader] = (
    speculators_reader.READER,
    block.READER,
    eagle3.READER,
    eagle.READER,
)


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

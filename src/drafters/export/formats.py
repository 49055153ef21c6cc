"""Tables of export formats by program and drafter, and of readers of other programs' formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.errors import UserError
from decode.model.target import Target
from drafters.export import dflash as block
from drafters.export import eagle, eagle3
from drafters.export import hf_model as whole
from drafters.export import medusa_mlp as heads
from drafters.export import speculators_read as speculators_reader
from drafters.export import speculators_write as speculators
from drafters.export.layout import Layout, Reader, Saved, Writer

# Program -> short name of the drafter -> writer.
WRITERS: Mapping[str, Mapping[str, Writer]] = {
    "vllm": {
        "dflash": block.vllm,
        "eagle": eagle.to_vllm,
        "eagle3": eagle3.to_vllm,
        "lm": whole.vllm,
        "medusa": heads.medusa,
        "medusa2": heads.medusa2,
        "mlp": heads.mlp,
    },
    "sglang": {
        "dflash": block.sglang,
        "eagle": eagle.to_sglang,
        "eagle3": eagle3.to_sglang,
        "lm": whole.sglang,
    },
    "speculators": {
        "dflash": speculators.dflash,
        "eagle3": speculators.eagle3,
        "p_eagle": speculators.p_eagle,
    },
    "hf": {
        "hf_dllm": whole.fills,
        "lm": whole.hf,
        "medusa2": whole.tuned,
    },
}
# The first reader that knows a config reads it; the most general come last.
READERS: Sequence[Reader] = (
    heads.MEDUSA,
    heads.MLP,
    speculators_reader.READER,
    block.READER,
    eagle3.READER,
    eagle.READER,
)
# Messages for missing formats, where there is an alternative.
INSTEAD: Mapping[tuple[str, str], str] = {
    ("vllm", "lstm"): "ArcticInference, which has one, is a plugin with files of its own; "
    "train drafter=mlp, or set to=native",
    ("vllm", "ngram"): "it has prompt lookup of its own: --speculative-config "
    """'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'""",
    ("vllm", "suffix"): "it has suffix decoding of its own, once arctic-inference is installed: "
    """--speculative-config '{"method": "suffix"}'""",
    ("sglang", "ngram"): "it has one of its own: --speculative-algorithm NGRAM",
    **dict.fromkeys(
        [(program, "diffusion") for program in ("vllm", "sglang", "speculators")],
        "it departs from DFlash, which has one (the newest feature in every position, a vector for each "
        "mask, norms of the taps); train drafter=dflash, or set to=native",
    ),
}


def check_format(drafter: str, to: str) -> None:
    """Check that a program has a format for a drafter.

    Raises:
        UserError: it has none.
    """
    if drafter not in WRITERS[to]:
        where = [program for program, writers in WRITERS.items() if drafter in writers]
        instead = INSTEAD.get((to, drafter), f"set to={' or '.join([*where, 'native'])}")
        raise UserError(f"to={to}: {to} has no format for drafter {drafter!r}; {instead}")


def write_layout(saved: Saved, target: Target, to: str) -> Layout:
    """Convert a drafter to another program's format.

    Raises:
        UserError: there is no format for this drafter, or the program does not support its settings.
    """
    check_format(saved.drafter, to)
    return WRITERS[to][saved.drafter](saved, target)


def find_reader(config: Mapping[str, Any]) -> Reader | None:
    """The reader for a `config.json`; None if the format is unknown."""
    return next((reader for reader in READERS if reader.knows(config)), None)

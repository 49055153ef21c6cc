"""The drafters that there are, by name."""

from __future__ import annotations

import importlib

from decode.errors import UserError
from drafters.base import Drafter

# A closed table: what a downloaded config names is looked up here and nowhere else.
CLASSES = {
    "bigram": "drafters.bigram:Bigram",
    "dflash": "drafters.dflash:DFlash",
    "diffusion": "drafters.diffusion:Diffusion",
    "eagle": "drafters.eagle:Eagle",
    "eagle3": "drafters.eagle3:Eagle3",
    "hf_dllm": "drafters.dllm:Dllm",
    "hydra": "drafters.hydra:Hydra",
    "lm": "drafters.lm:DraftLM",
    "lyanna": "drafters.lyanna:Lyanna",
    "lstm": "drafters.mlp:Lstm",
    "medusa": "drafters.medusa:Medusa",
    "medusa2": "drafters.medusa:Medusa2",
    "mlp": "drafters.mlp:Mlp",
    "ngram": "drafters.ngram:Ngram",
    "p_eagle": "drafters.p_eagle:PEagle",
    "prism": "drafters.prism:Prism",
    "suffix": "drafters.suffix:Suffix",
}


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a short name.

    Raises:
        UserError: a name that is not in the table.
    """
    if name not in CLASSES:
        raise UserError(f"drafter {name!r} is not known; known are {', '.join(sorted(CLASSES))}")
    module, _, attribute = CLASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def short_name(drafter: Drafter) -> str:
    """The inverse of `drafter_class`."""
    where = f"{type(drafter).__module__}:{type(drafter).__qualname__}"
    return next(name for name, entry in CLASSES.items() if entry == where)

"""All drafters, by short name."""

from __future__ import annotations

import importlib

from decode.errors import UserError
from drafters.base import Drafter

# A closed table: the class that a downloaded config names is looked up here only.
CLASSES = {
    "bigram": "drafters.models.bigram:Bigram",
    "dflash": "drafters.models.dflash:DFlash",
    "diffusion": "drafters.models.diffusion:Diffusion",
    "eagle": "drafters.models.eagle:Eagle",
    "eagle3": "drafters.models.eagle3:Eagle3",
    "hf_dllm": "drafters.models.hf_dllm:Dllm",
    "hydra": "drafters.models.hydra:Hydra",
    "lm": "drafters.models.lm:DraftLM",
    "lyanna": "drafters.models.lyanna:Lyanna",
    "lstm": "drafters.models.mlp:Lstm",
    "medusa": "drafters.models.medusa:Medusa",
    "medusa2": "drafters.models.medusa:Medusa2",
    "mlp": "drafters.models.mlp:Mlp",
    "ngram": "drafters.models.ngram:Ngram",
    "p_eagle": "drafters.models.p_eagle:PEagle",
    "prism": "drafters.models.prism:Prism",
    "suffix": "drafters.models.suffix:Suffix",
}


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a short name.

    Raises:
        UserError: the name is not in the table.
    """
    if name not in CLASSES:
        raise UserError(f"drafter {name!r} is not known; known are {', '.join(sorted(CLASSES))}")
    module, _, attribute = CLASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def short_name(drafter: Drafter) -> str:
    """The inverse of `drafter_class`."""
    where = f"{type(drafter).__module__}:{type(drafter).__qualname__}"
    return next(name for name, entry in CLASSES.items() if entry == where)

"""All drafters, by short name."""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from decode.errors import UserError
from drafters.base import Drafter

# Closed tables: a downloaded config can name only these classes.
CLASSES = {
    "bigram": "drafters.models.bigram:Bigram",
    "dflash": "drafters.models.dflash:DFlash",
    "diffusion": "drafters.models.diffusion:Diffusion",
    "dspark": "drafters.models.dflash:DSpark",
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
    "mtp": "drafters.models.mtp:Mtp",
    "ngram": "drafters.models.ngram:Ngram",
    "p_eagle": "drafters.models.p_eagle:PEagle",
    "prism": "drafters.models.prism:Prism",
    "skip": "drafters.models.skip:Skip",
    "sparse": "drafters.models.sparse:Sparse",
    "suffix": "drafters.models.suffix:Suffix",
    "union": "drafters.models.union:Union",
}
ZOO = {  # reproductions of papers that lose to a drafter of `CLASSES` on both targets
    "boosted": "drafters.zoo.boosted:Boosted",
    "cascade": "drafters.zoo.cascade:Cascade",
    "lookahead": "drafters.zoo.lookahead:Lookahead",
    "prompt": "drafters.zoo.prompt:Prompt",
    "recycle": "drafters.zoo.recycle:Recycle",
    "tidar": "drafters.zoo.tidar:Tidar",
}
KNOWN = ChainMap(CLASSES, ZOO)


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a short name.

    Raises:
        UserError: an unknown name.
    """
    if name not in KNOWN:
        raise UserError(f"drafter {name!r} is not known; known are {', '.join(sorted(KNOWN))}")
    module, _, attribute = KNOWN[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def nested(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Drafters in a drafter's settings, as {drafter: ..., settings: ...}: setting, short name, settings.

    Raises:
        UserError: an entry of another form, or an unknown drafter.
    """
    for name, part in settings.items():
        if not isinstance(part, Mapping) or "drafter" not in part:
            continue
        kinds = {"drafter": str, "settings": dict}
        if part.keys() != kinds.keys() or not all(isinstance(part[key], kinds[key]) for key in kinds):
            raise UserError(f"settings.{name}: must be the name of a drafter and its settings")
        drafter_class(part["drafter"])
        yield name, part["drafter"], part["settings"]


def short_name(drafter: Drafter) -> str:
    """The inverse of `drafter_class`."""
    where = f"{type(drafter).__module__}:{type(drafter).__qualname__}"
    return next(name for name, entry in KNOWN.items() if entry == where)

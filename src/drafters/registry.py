"""All drafters, by short name."""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from decode.errors import UserError
from drafters.base import Drafter
from drafters.installed import installed

# A downloaded config can name only these classes, and those that installed packages declare.
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


def known_names() -> list[str]:
    """Names of all drafters, those of installed packages included."""
    return sorted({*KNOWN, *installed("drafter")})


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a short name.

    Raises:
        UserError: an unknown name, or one whose package is broken.
    """
    if name in KNOWN:  # a package cannot replace it
        module, _, attribute = KNOWN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if other := installed("drafter").get(name):
        other.check(built_in=False)
        found = other.load()
        if not isinstance(found, type) or not issubclass(found, Drafter):
            raise other.error(f"{other.path} is no subclass of drafters.base.Drafter")
        if (where := f"{found.__module__}.{found.__qualname__}") != other.path:
            raise other.error(f"its entry point must name the module that defines it, {where}")
        return found
    raise UserError(
        f"drafter {name!r} is not known; install the package that has it, or choose one of "
        f"{', '.join(known_names())}"
    )


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
    """Name of a drafter's class; see `class_name`."""
    return class_name(type(drafter))


def class_name(kind: type) -> str:
    """The inverse of `drafter_class`.

    Raises:
        UserError: a class that has no name.
    """
    where = f"{kind.__module__}:{kind.__qualname__}"
    others = {name: other.entry.value for name, other in installed("drafter").items()}
    if name := next((name for name, entry in [*KNOWN.items(), *others.items()] if entry == where), None):
        return name
    raise UserError(
        f"{where}: not a known drafter; declare it as an entry point of the group foredraft.drafters in the "
        "pyproject.toml of its package, and install that"
    )

"""foredraft: train drafters for speculative decoding, and decode with them without changing a distribution.

import foredraft
target = foredraft.load_target("data/pocket")
drafter = foredraft.load_drafter("outputs/<date>/<time>/checkpoints/best", target)
print(foredraft.generate(target, "How do I use grep?", drafter).text)
print(foredraft.score(target, drafter, ["How do I use grep?"]).headline.tau)
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from distill.utils.thread_spinning import spin_briefly as _spin_briefly

if _TYPE_CHECKING:
    from decode.errors import FollowUpError, RemoteError, UserError
    from decode.plan import Plan
    from distill.text_generation import Model
    from foredraft.api import (
        Answer,
        generate,
        load_drafter,
        push_drafter,
        save_drafter,
        score,
        stream,
    )
    from foredraft.custom_generate import assist
    from foredraft.targets import load_target
    from foredraft.training import TrainedRun, train

# Public name -> its module. `foredraft --help` imports this package too, and does not wait for torch.
_PLACES = {
    "Answer": "foredraft.api",
    "FollowUpError": "decode.errors",
    "Model": "distill.text_generation",
    "Plan": "decode.plan",
    "RemoteError": "decode.errors",
    "TrainedRun": "foredraft.training",
    "UserError": "decode.errors",
    "assist": "foredraft.custom_generate",
    "generate": "foredraft.api",
    "load_drafter": "foredraft.api",
    "load_target": "foredraft.targets",
    "push_drafter": "foredraft.api",
    "save_drafter": "foredraft.api",
    "score": "foredraft.api",
    "stream": "foredraft.api",
    "train": "foredraft.training",
}
__all__ = [
    "Answer",
    "FollowUpError",
    "Model",
    "Plan",
    "RemoteError",
    "TrainedRun",
    "UserError",
    "assist",
    "generate",
    "load_drafter",
    "load_target",
    "push_drafter",
    "save_drafter",
    "score",
    "stream",
    "train",
]

_spin_briefly()  # before torch is imported


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return getattr(_import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__

"""foredraft: train drafters for speculative decoding, and decode with them without changing a distribution.

import foredraft
model = foredraft.load_target("data/pocket")
drafter = foredraft.load_drafter("outputs/<date>/<time>/checkpoints/best", model)
print(foredraft.generate(model, "How do I use grep?", drafter).text)
print(foredraft.score(model, drafter, ["How do I use grep?"]).headline.tau)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distill.utils.thread_waiting import wait_passively

if TYPE_CHECKING:
    from foredraft.api import Answer, Model, generate, load_drafter, load_target, score, stream

__all__ = ["Answer", "Model", "generate", "load_drafter", "load_target", "score", "stream"]

wait_passively()  # before torch is imported


def __getattr__(name: str) -> Any:
    # The command `foredraft --help` imports this package too, and does not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    from foredraft import api

    return getattr(api, name)

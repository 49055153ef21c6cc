"""How often a drafter multiplies by an output head in a round: what Lyanna saves, and Medusa pays K times."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from decode.generation.generate import generate
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Drafter

TOKENS = 16  # decoded to count


class _Products(TorchDispatchMode):
    """Counts operations that read one of the heads' weights."""

    def __init__(self, heads: list[Tensor]) -> None:
        super().__init__()
        self._heads, self.count = {head.data_ptr() for head in heads}, 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            self.count += any(isinstance(a, Tensor) and a.data_ptr() in self._heads for a in args)
        return func(*args, **(kwargs or {}))


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.linear}


class _Watched:
    """A drafter whose drafts are counted."""

    def __init__(self, drafter: Drafter, products: _Products) -> None:
        self._drafter, self._products, self.drafts = drafter, products, 0
        self.new_state, self.advance, self.select = drafter.new_state, drafter.advance, drafter.select

    def propose(self, *args: Any) -> Any:
        self.drafts += 1
        with self._products:
            return self._drafter.propose(*args)


def head_calls(target: Target, drafter: Drafter, prompt: list[int], plan: Plan) -> float:
    """Products with an output head a draft, greedily.

    A head is the target's, or a matrix of the drafter's with a row for each token that it can draft,
    but for a token-info bias, whose columns are few.
    """
    sizes = {target.vocab_size, drafter.settings.get("draft_vocab_size")}
    heads = [target.head.weight] + [
        weight
        for name, weight in drafter.named_parameters()
        if weight.dim() == 2 and weight.shape[0] in sizes and not name.startswith("info.")
    ]
    watched = _Watched(drafter, products := _Products(heads))
    generate(
        target, cast("Proposer", watched), [prompt], sampler=Sampler(0.0), plan=plan, max_new_tokens=TOKENS
    )
    return products.count / max(watched.drafts, 1)

"""Base class of drafters that run a cheaper version of the target itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters.base import Drafter
from drafters.drafting.tree import expand
from drafters.layers.decoder_layer import level_visibility
from drafters.vocabulary import Vocabulary

# (B, n) drafted tokens, (B, n, m) mask over scratch slots (None: causal), and the number of scratch slots
# before them -> (B, n, D) input of the head
Read = Callable[[Tensor, Tensor | None, int], Tensor]


@dataclass(slots=True)
class SelfState:
    """Newest token of every row; None before the first `advance`."""

    root: Tensor | None = None  # (B,)


class SelfDrafter(Drafter):
    """Runs the target's own layers on the root and on drafted tokens, over the cache of the settled text.

    It writes to the slots after the settled ones; verification overwrites them. It never calls `keep`, so
    they are not settled.
    """

    traits = Traits(reads_cache=True)

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        drafter = cls(**settings)
        drafter.check_target(target)
        return drafter

    def check_target(self, target: Target) -> None:
        """Check that the drafter can draft for a target.

        Raises:
            UserError: the target's layers cannot be run one by one.
        """
        if target.fused is None:
            raise UserError(
                f"drafter: {type(target.model).__name__} cannot draft for itself here; use a Llama, "
                "Mistral, Qwen2 or Qwen3 model with full attention, whole and on one device"
            )

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> Any:
        return SelfState()

    @override
    def advance(
        self,
        state: Any,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        state.root = root

    @abstractmethod
    def reader(self, state: Any, target: Target) -> Read:
        """Function that reads the root and drafted tokens after the settled text."""

    @override
    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        read, head = self.reader(state, target), self.output_head(target.head)
        last, scratch = read(state.root[:, None], None, 0), 1  # (B, W, D) of the last level; slots in use
        reach: Tensor | None = None  # (B, W, m) mask over scratch slots; None: causal

        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal last, scratch, reach
            reach = level_visibility(reach, parent, scratch)
            last = read(token, reach, scratch)
            scratch += token.shape[1]
            return head(last)

        vocabulary, confidence = Vocabulary.of(head, target), self.confidence_of(lambda: last)
        return expand(head(last)[:, 0], step, sampler, coin, plan, vocabulary, confidence)

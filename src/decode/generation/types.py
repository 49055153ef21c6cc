"""What goes into the decoding loop and what comes out of it: the proposer, rounds, outputs, times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from decode.draft import Draft
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.verify import Verdict

# Makes a request's own test: told every token the request emits, in order, True ends it there.
Until = Callable[[], Callable[[int], bool]]


class Proposer(Protocol):
    """All that the decoder knows of a drafter. State lives in an object, never on the module.

    One whose drafts may depend on where earlier rounds began, and not on the text alone, has a method
    `remembers`, which says so of a plan; and where they depend on the other rows of a batch as well, an
    attribute `sociable`.
    """

    def new_state(self, rows: int) -> Any:
        """State for `rows` fresh sequences."""
        ...

    def advance(
        self, state: Any, target: Target, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor
    ) -> None:
        """Absorb settled tokens.

        Args:
            state: from `new_state`; changed in place.
            target: for its embedding.
            tokens: (B, M) right-padded; entries past `counts` are ignored.
            taps: (B, M, L, D) of these tokens.
            counts: tokens per row, at least 1.
            root: (B,) the token after them, which the target has not read.
        """
        ...

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""
        ...

    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root. Proposing twice gives the same draft."""
        ...


def remembers(drafter: Proposer, plan: Plan) -> bool:
    """Whether its drafts depend on where earlier rounds began."""
    if plan.adapt is not None:
        return True
    says: Callable[[Plan], bool] | None = getattr(drafter, "remembers", None)
    return says is not None and says(plan)


@dataclass(slots=True)
class Output:
    """One request, finished or under way.

    Attributes:
        tokens: generated, up to and including the one that ended them.
        emitted: tokens each verification round gave, cut at the end; the first token comes from
            the prefill and belongs to no round.
        accepted: draft tokens each round accepted, before any cut.
        offered: depth of the draft each round was offered.
        drafted: draft nodes each round was offered.
        stopped: ended by an end token or by `until` rather than by length.
        ttft: seconds from the start of the batch to the first token.
    """

    tokens: list[int]
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    stopped: bool = False
    ttft: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens a round, the target's own included; 0 where there was no round."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else 0.0


@dataclass(slots=True)
class Times:
    """Seconds spent; `other` is what is left of `total`. Prefill is no part of the shares.

    What a consumer of `stream` does between two pieces is in none of them.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Bookkeeping: rules, coins, compaction, the loop."""
        return self.total - self.draft - self.verify


class Round(NamedTuple):
    """One verification as observers see it, the prefill (which drafts nothing) included."""

    requests: list[int]  # index of each row's request
    logits: Tensor  # (B, S, V)
    draft: Draft
    verdict: Verdict
    emitted: list[list[int]]  # per row, cut at the end


@dataclass(slots=True)
class Generation:
    """All requests' outputs, in the order they were given."""

    outputs: list[Output]
    times: Times


class Piece(NamedTuple):
    """What one round of a streamed request settled; the first comes from the prefill.

    `output` and `times` are one object each for all pieces of a stream, and grow with it; after
    the last piece they are what `generate` returns.
    """

    tokens: list[int]  # at least one, cut at the end
    drafted: list[bool]  # per token: an accepted draft token, or else the target's own
    output: Output
    times: Times

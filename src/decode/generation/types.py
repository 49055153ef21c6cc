"""Interfaces of the decoding loop: `Proposer`, and the outputs, times and rounds it produces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from decode.draft import Draft
from decode.model.target import Tap, Target
from decode.plan import AUTO_RULES, Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.verification.result import VerificationResult

# Factory of a stop test per request. The test gets each emitted token in order; True ends the request.
Until = Callable[[], Callable[[int], bool]]


@dataclass(frozen=True, slots=True)
class Traits:
    """What decoding, scores and training need to know of a proposer.

    Attributes:
        proposals: supported values of `Plan.proposal`.
        depth_invariant: the prediction for depth j at anchor t is the one for depth 1 at t + j - 1, as in any
            language model; training then yields depth 1 only.
        depends_on_batch: drafts may depend on the other rows of the batch.
        reads_cache: it reads the target's cache, which at `advance` and `propose` holds the settled text. It
            may write behind the settled slots, where verification writes next, and settles nothing.
        tunes_target: the verifier has other weights, so that its output is not the original target's.
        drafts_in_verification: the pass that verifies a draft also computes the next one.
    """

    proposals: tuple[str, ...] = tuple(AUTO_RULES)
    depth_invariant: bool = False
    depends_on_batch: bool = False
    reads_cache: bool = False
    tunes_target: bool = False
    drafts_in_verification: bool = False


class Proposer(Protocol):
    """Interface of a drafter. Its decoding state is an object of its own, never kept on the module.

    What some drafters have is a protocol each: `ReadsTaps`, `Observes`, `DependsOnRounds`, `ChecksPlans`.
    """

    @property
    def traits(self) -> Traits:
        """See `Traits`."""
        ...

    def new_state(self, rows: int) -> Any:
        """Return state for `rows` new sequences."""
        ...

    def advance(
        self, state: Any, target: Target, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor
    ) -> None:
        """Update the state with settled tokens.

        Args:
            state: from `new_state`; changed in place.
            target: provides the embedding.
            tokens: (B, M) right-padded; entries past `counts` are ignored.
            taps: (B, M, L, D) of these tokens.
            counts: tokens per row, at least 1; from the loop a `Settled`, which is on the device too.
            root: (B,) the token after them, which the target has not read.
        """
        ...

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""
        ...

    def append(self, state: Any, target: Target, other: Any) -> None:
        """Add another state's rows behind these. Both have advanced since they drafted."""
        ...

    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root. Two calls in a row give the same draft."""
        ...


@runtime_checkable
class ReadsTaps(Protocol):
    """A proposer that reads hidden states of the target."""

    @property
    def taps(self) -> Sequence[Tap]:
        """Layer ids, or "last"; none: it reads none."""
        ...


@runtime_checkable
class Observes(Protocol):
    """A proposer that is told what the target answers to its drafts."""

    def observe(self, state: Any, answers: Sequence[Sequence[int]]) -> None:
        """Called after every verification.

        Args:
            state: of the rows.
            answers: the target's most likely tokens, at the root's slot and at every node's, row by row.
        """
        ...


@runtime_checkable
class DependsOnRounds(Protocol):
    """A proposer whose drafts may depend on where earlier rounds began, and not on the text only."""

    def depends_on_rounds(self, plan: Plan) -> bool:
        """Whether this plan's do."""
        ...


@runtime_checkable
class ChecksPlans(Protocol):
    """A proposer that cannot draft by every plan."""

    def check(self, plan: Plan) -> None:
        """Raises UserError where it cannot draft by this one."""
        ...


def depends_on_rounds(drafter: Proposer, plan: Plan) -> bool:
    """Whether the drafts of this plan depend on where earlier rounds began."""
    return plan.adapt is not None or (
        isinstance(drafter, DependsOnRounds) and drafter.depends_on_rounds(plan)
    )


@dataclass(slots=True)
class Output:
    """Output of one request, finished or in progress.

    Attributes:
        tokens: generated tokens, up to and including the end token.
        emitted: number of tokens emitted per verification round, after the cut at the end. The first
            token comes from the prefill and belongs to no round.
        accepted: number of draft tokens accepted per round, before the cut.
        draft_lengths: depth of the draft per round.
        drafted: number of draft nodes per round.
        stopped: ended by an end token or by `until`, not by length.
        ttft: seconds from the start of the batch to the first token.
    """

    tokens: list[int]
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    stopped: bool = False
    ttft: float = 0.0

    @property
    def tau(self) -> float:
        """Acceptance length: mean tokens per round, the target's included; 0 without rounds."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else 0.0


@dataclass(slots=True)
class Times:
    """Seconds spent. `total` covers the rounds: draft, verify and `other`; prefill is separate.

    On a GPU `draft` and `verify` need a clock, see `generate`: without one the host runs ahead of the device.

    Time that a consumer of `stream` spends between two pieces is not counted.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Seconds of everything else: acceptance rules, random numbers, cache compaction, the loop."""
        return self.total - self.draft - self.verify


class Round(NamedTuple):
    """One verification, as passed to `on_round`. The prefill counts as a round without a draft."""

    requests: list[int]  # index of each row's request
    logits: Tensor  # (B, S, V)
    draft: Draft
    result: VerificationResult
    emitted: list[list[int]]  # tokens per row, cut at the end


@dataclass(slots=True)
class Generation:
    """Outputs of all requests, in the order given, and times of the batch."""

    outputs: list[Output]
    times: Times

    def followed_by(self, other: Generation) -> Generation:
        """This batch, and another one decoded after it."""
        names = [one.name for one in fields(Times)]
        sums = Times(*(getattr(self.times, name) + getattr(other.times, name) for name in names))
        return Generation([*self.outputs, *other.outputs], sums)


class Piece(NamedTuple):
    """Tokens that one round of a stream settled; the first piece comes from the prefill.

    `output` and `times` are shared by all pieces of a stream and updated in place; after the last piece
    they equal what `generate` returns.
    """

    tokens: list[int]  # at least one, cut at the end
    drafted: list[bool]  # per token: whether it is an accepted draft token
    output: Output
    times: Times

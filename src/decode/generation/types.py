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
    """Properties of a proposer that decoding, scoring and training depend on.

    Attributes:
        proposals: supported values of `Plan.proposal`.
        depth_invariant: the prediction for depth j at anchor t equals depth 1's at t + j - 1, as in a
            language model; training then yields only depth 1.
        depends_on_batch: drafts may depend on the other rows of the batch.
        reads_cache: it reads the target's cache, which holds the settled text at `advance` and `propose`. It
            may write after the settled slots, where verification writes next, and settles nothing.
        tunes_target: the verifier has other weights, so its output differs from the original target's.
        drafts_in_verification: the pass that verifies a draft also computes the next one.
    """

    proposals: tuple[str, ...] = tuple(AUTO_RULES)
    depth_invariant: bool = False
    depends_on_batch: bool = False
    reads_cache: bool = False
    tunes_target: bool = False
    drafts_in_verification: bool = False


class Proposer(Protocol):
    """Interface of a drafter. Its decoding state is a separate object, never kept on the module.

    Optional abilities are separate protocols: `ReadsTaps`, `Observes`, `DependsOnRounds`, `ChecksPlans`.
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
            counts: (B,) tokens per row, at least 1; a `Settled` if the loop calls.
            root: (B,) the next token, not yet read by the target.
        """
        ...

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""
        ...

    def append(self, state: Any, target: Target, other: Any) -> None:
        """Append another state's rows. Both have advanced since they drafted."""
        ...

    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root. Two calls in a row give the same draft."""
        ...


@runtime_checkable
class ReadsTaps(Protocol):
    """A proposer that reads the target's hidden states."""

    @property
    def taps(self) -> Sequence[Tap]:
        """Layer ids, or "last"; empty: it reads none."""
        ...


@runtime_checkable
class Observes(Protocol):
    """A proposer that is notified of the target's answers to its drafts."""

    def observe(self, state: Any, answers: Sequence[Sequence[int]]) -> None:
        """Called after every verification.

        Args:
            state: of the rows.
            answers: for each row the target's most likely tokens at the root's slot and at every node's.
        """
        ...


@runtime_checkable
class DependsOnRounds(Protocol):
    """A proposer with drafts that may depend on where earlier rounds started, not only on the text."""

    def depends_on_rounds(self, plan: Plan) -> bool:
        """Whether the drafts of this plan do."""
        ...


@runtime_checkable
class ChecksPlans(Protocol):
    """A proposer that does not support every plan."""

    def check(self, plan: Plan) -> None:
        """Raise UserError if it does not support this plan."""
        ...


def depends_on_rounds(drafter: Proposer, plan: Plan) -> bool:
    """Whether the drafts of this plan depend on where earlier rounds started."""
    return plan.adapt is not None or (
        isinstance(drafter, DependsOnRounds) and drafter.depends_on_rounds(plan)
    )


@dataclass(slots=True)
class Output:
    """Output of one request, finished or in progress.

    Attributes:
        tokens: generated tokens, including the end token.
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

    On a GPU `draft` and `verify` need a clock (see `generate`), because the host runs ahead of the device.

    Time that a caller of `stream` spends between two pieces is not counted.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Seconds of everything else: verification rules, random numbers, cache compaction, the loop."""
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
    """Outputs of all requests, in the order given, and times of the batch.

    Attributes:
        passes: how the target's passes ran: "uncompiled", "compiled", "captured",
            "verification captured", the latter two also ", compiled"; "" without passes.
    """

    outputs: list[Output]
    times: Times
    passes: str = ""

    def followed_by(self, other: Generation) -> Generation:
        """Combine this batch with one decoded after it."""
        names = [one.name for one in fields(Times)]
        sums = Times(*(getattr(self.times, name) + getattr(other.times, name) for name in names))
        passes = dict.fromkeys(part for part in (self.passes, other.passes) if part)
        return Generation([*self.outputs, *other.outputs], sums, " and ".join(passes))


class Piece(NamedTuple):
    """Tokens that one round of a stream settled; the first piece comes from the prefill.

    `output` and `times` are shared by all pieces of a stream and updated in place; after the last piece
    they equal what `generate` returns.
    """

    tokens: list[int]  # at least one, cut at the end
    drafted: list[bool]  # per token: whether it is an accepted draft token
    output: Output
    times: Times

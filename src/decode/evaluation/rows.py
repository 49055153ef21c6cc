"""A row of a scorecard: what was measured with one sampler, plan and batch size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decode.evaluation.quality import Quality
from decode.evaluation.replay import ContextPart, Counts
from decode.evaluation.served import BY_ENGINE

# Fields of a row that need a decoder run
DECODED = (
    *("acceptance_rate", "tokens_per_second", "plain_tokens_per_second", "speedup", "overhead"),
    *("draft_share", "verify_share", "other_share", "ttft", "tpot"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time with and without the drafter, interleaved, by batch or by pair of batches; prefill excluded.

    Attributes:
        seconds: s with the drafter, summed over repeats.
        tokens: tokens decoded in them, i.e. all but the first of each request.
        plain_seconds: s by plain decoding of the same batch, or of one of the pair.
        plain_tokens: tokens decoded in them.
        passes: how the target's passes with the drafter ran; see `Generation`. "": unknown, in old files.
        plain_passes: likewise by plain decoding.
    """

    seconds: list[float]
    tokens: list[int]
    plain_seconds: list[float]
    plain_tokens: list[int]
    passes: str = ""
    plain_passes: str = ""

    @property
    def passes_text(self) -> str:
        """How both sides ran: one word if alike."""
        if self.passes == self.plain_passes:
            return self.passes
        return f"{self.passes}, plain decoding {self.plain_passes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Acceptance on the target's stored answers.

    Attributes:
        method: "exact", or "estimate (why)" if counted in a decoder run.
        tau: tokens per target pass.
        tau_interval: 95 % bootstrap interval of tau over prompts.
        survival: P(accepted >= j) of a round, j from 1.
        prompts: number of answers.
        counts: tokens and (expected) rounds of each answer.
        difference_interval: 99 % interval of the decoder's tau minus this one on shared prompts; None without
            shared prompts.
        agrees: 0 lies in that interval.
        selection_tau: tau for selecting the best checkpoint: on answers to prompts that the decoder does not
            decode, or on all answers if there are no others.
        by_context: rounds by context length; empty if they are not replayed one by one.
    """

    method: str
    tau: float
    tau_interval: list[float]
    survival: list[float]
    prompts: int
    counts: Counts
    difference_interval: list[float] | None
    agrees: bool
    selection_tau: float
    by_context: list[ContextPart] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Computed without sampling noise."""
        return self.method == "exact"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Row:
    """One setting: a sampler, a plan and a batch size, with the decoder's counts.

    If an engine decodes the target (`Conditions.elsewhere`), counts are the replay's, and fields that need
    a decoder run are None.

    Attributes:
        temperature: of target and drafter.
        decode: name of the plan.
        rule: acceptance rule.
        lossy: the rule does not keep the target's distribution.
        batch_size: requests decoded together.
        nodes: draft tokens verified per round.
        tau: tokens per target pass, the target's own included.
        tau_interval: 95 % bootstrap interval of tau over prompts.
        survival: P(accepted >= j) of a round, j from 1.
        alpha: P(accepted >= j | accepted >= j - 1, j offered), j from 1.
        offered: P(offered >= j), j from 1: below 1 if drafts end early; empty without a decoder run.
        acceptance_rate: accepted draft tokens per draft token.
        rounds: verification rounds of all prompts.
        tokens: tokens of all prompts, without the first of each.
        tokens_per_second: tokens/s, prefill excluded.
        plain_tokens_per_second: the same for plain decoding.
        speedup: ratio of these two speeds.
        overhead: tau / speedup - 1: extra cost of a round over a plain one.
        draft_share: share of decoding time in the drafter, 0 to 1.
        verify_share: share in the target's passes.
        other_share: share in everything else.
        ttft: s to the first token, mean over requests.
        tpot: s per output token of one request.
        timing: times by batch or by pair of batches; None in old files.
        replay: None if nothing was replayed.
        quality: of a lossy rule's answers; None for lossless rules, and in old files.
        plan: its settings, as `plan_of` reads them; None in old files.
    """

    temperature: float
    decode: str
    rule: str
    lossy: bool
    batch_size: int
    nodes: int
    tau: float
    tau_interval: list[float]
    survival: list[float]
    alpha: list[float]
    offered: list[float]
    acceptance_rate: float | None
    rounds: int
    tokens: int
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    speedup: float | None
    overhead: float | None
    draft_share: float | None
    verify_share: float | None
    other_share: float | None
    ttft: float | None
    tpot: float | None
    timing: Timing | None = None
    replay: Replay | None = None
    quality: Quality | None = None
    plan: dict[str, Any] | None = None

    def __repr__(self) -> str:
        """The setting, tau and speedup, in a line."""
        setting = f"{self.decode}, T={self.temperature:g}, batch {self.batch_size}"
        speedup = self.text("speedup", "{:.2f}x", BY_ENGINE)
        return f"Row({setting}: tau {self.acceptance.tau:.2f} ({self.source}), speedup {speedup})"

    @property
    def acceptance(self) -> Replay | Row:
        """Source of tau, its interval and survival: the replay, or the decoder's counts without one."""
        return self.replay or self

    @property
    def speed(self) -> float:
        """Speedup to sort by; 0 if nothing was decoded."""
        return self.speedup or 0.0

    def text(self, name: str, form: str, none: str = "-") -> str:
        """A field that needs a decoder run, formatted with `form`, or `none` if it is None."""
        value = getattr(self, name)
        return none if value is None else form.format(value)

    @property
    def source(self) -> str:
        """Where `acceptance` is from: "replayed", "estimated" or "decoded"."""
        return "decoded" if self.replay is None else "replayed" if self.exact else "estimated"

    @property
    def exact(self) -> bool:
        """Acceptance was replayed without sampling noise."""
        return self.replay is not None and self.replay.exact

    @property
    def counts(self) -> Counts:
        """Tokens and rounds of each replayed answer; empty if nothing was replayed."""
        return self.replay.counts if self.replay else Counts([], [])


def check_lengths(row: Row, where: str) -> None:
    """Check the lengths of intervals and of lists over the same prompts or batches.

    Raises:
        ValueError: a length is wrong.
    """
    replay, timing = row.replay, row.timing
    pairs = {"tau_interval": row.tau_interval}
    if replay:
        pairs["replay.tau_interval"] = replay.tau_interval
        pairs["replay.difference_interval"] = replay.difference_interval or [0.0, 0.0]
    for name, pair in pairs.items():
        if len(pair) != 2:
            raise ValueError(f"{where}.{name}: {len(pair)} numbers, not 2")
    lists = {"replay.counts": list(replay.counts) if replay else [], "timing": []}
    if timing:
        lists["timing"] = [timing.seconds, timing.tokens, timing.plain_seconds, timing.plain_tokens]
    for name, same in lists.items():
        if len({len(one) for one in same}) > 1:
            raise ValueError(f"{where}.{name}: lists of different lengths")

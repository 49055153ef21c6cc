"""Two records of a scorecard: its headline, and an engine's measurements of the same checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

BY_ENGINE = "decoded by an engine"  # shown instead of a speedup


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One setting decoded by an engine.

    Attributes:
        engine: name and version.
        decode: name of the plan of the compared scorecard row.
        temperature: of the answers.
        batch_size: requests in flight.
        depth: draft length in tokens.
        prompts: number of prompts.
        tokens: number of tokens of the answers.
        rounds: drafting rounds, by the engine's counters.
        tau: tokens per round, by its counters.
        survival: share of rounds that accept at least j draft tokens, j from 1.
        scored_tau: of the scorecard's row.
        scored_survival: of the scorecard's row.
        noise: for each of `survival`, the largest difference by chance.
        tokens_per_second: of the engine's answers, prefill and transport included.
        plain_tokens_per_second: the same without a drafter; None: not measured.
        texts: counts of greedy answers: equal to the plain ones, different after a near tie, and others; None
            above temperature 0 or without plain answers.
        same_rounds: counts of greedy answers: with as many rounds as here, and compared, i.e. with the same
            text as here; None above temperature 0, in batches, or if the engine does not report them.
        excess: surprisal of the sampled answers minus the target's entropy, in nats a token, and its standard
            error; None at temperature 0.
        agrees: no figure differs from the scorecard's by more than chance, and sampled answers are drawn from
            the target.
        cause: likely cause of a disagreement, in one line.
    """

    engine: str
    decode: str
    temperature: float
    batch_size: int
    depth: int
    prompts: int
    tokens: int
    rounds: int
    tau: float
    survival: list[float]
    scored_tau: float
    scored_survival: list[float]
    noise: list[float]
    tokens_per_second: float
    plain_tokens_per_second: float | None
    texts: list[int] | None
    same_rounds: list[int] | None
    agrees: bool
    cause: str = ""
    excess: list[float] | None = None

    @property
    def speedup(self) -> float | None:
        """Speed of the engine's answers over its plain ones; None if not measured."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The two numbers that a checkpoint is known by, both of one draft: plan, temperature and batch size.

    Attributes:
        tau: tokens per target pass: replayed, or counted by the decoder where nothing was replayed.
        tau_interval: 95 % interval of tau over prompts.
        source: "replayed", "estimated" (replay with sampling noise) or "decoded".
        prompts: number of answers behind tau.
        speedup: over plain decoding; None if an engine decodes.
        decode: name of the plan.
        temperature: of target and drafter.
        batch_size: requests decoded together.
    """

    tau: float
    tau_interval: list[float]
    source: str
    prompts: int
    speedup: float | None
    decode: str
    temperature: float
    batch_size: int

    @property
    def tau_text(self) -> str:
        """Tau with its interval and source."""
        low, high = self.tau_interval
        return f"tau {self.tau:.2f} ({low:.2f}..{high:.2f}, {self.source})"

    @property
    def speedup_text(self) -> str:
        """Speedup, or that an engine decodes."""
        return BY_ENGINE if self.speedup is None else f"speedup {self.speedup:.2f}x"

    @property
    def setting(self) -> str:
        """Plan, temperature and batch size of both numbers."""
        return f"{self.decode}, T={self.temperature:g}, batch {self.batch_size}"

"""An engine's measurements of a checkpoint, compared with the scorecard's row of the same chain."""

from __future__ import annotations

from dataclasses import dataclass


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
        agrees: no figure differs from the scorecard's by more than chance.
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

    @property
    def speedup(self) -> float | None:
        """Speed of the engine's answers over its plain ones; None if not measured."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None

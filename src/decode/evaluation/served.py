"""What an engine measured of a checkpoint, and the scorecard's own row of the same chain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One setting as an engine decoded it.

    Attributes:
        engine: name and version.
        decode: name of the plan of the scorecard's row that it is compared with.
        temperature: of the answers.
        batch_size: requests in flight.
        depth: draft length in tokens.
        prompts: that were sent.
        tokens: of the answers.
        rounds: that drafted, by the engine's counters.
        tau: tokens per round, by its counters.
        survival: share of rounds that accept at least j draft tokens, j from 1.
        scored_tau: of the scorecard's row.
        scored_survival: likewise.
        noise: of each of `survival`: the largest difference by chance.
        tokens_per_second: of the engine's answers, prefill and transport included.
        plain_tokens_per_second: likewise without a drafter; None: not measured.
        texts: greedy answers that are its plain ones, that part from them where two tokens are as likely up
            to rounding, and others; None above temperature 0, or where there are no plain ones.
        same_rounds: greedy answers that took as many rounds as here, and how many were compared: those with
            the same text here; None above temperature 0, in batches, or where the engine does not say.
        agrees: no figure differs from the scorecard's by more than chance.
        cause: what is likely wrong where it does not agree, in one line.
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
        """Of the engine's answers over its plain ones; None where these were not measured."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None

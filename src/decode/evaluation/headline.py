"""The headline of a checkpoint: one tau and one speedup, of the same draft."""

from __future__ import annotations

from dataclasses import dataclass

BY_ENGINE = "decoded by an engine"  # shown instead of a speedup


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

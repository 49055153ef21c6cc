"""How processes share a drafter's weights, gradients and optimizer state, and what they send for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distill.commands.planning import constants as c


class Sharing(NamedTuple):
    """A trainer, in bytes of a trained weight in fp32 (ZeRO, arXiv:1910.02054, section 5; FSDP likewise).

    Attributes:
        trainer: conf/trainer.
        whole: bytes that each process holds.
        shared: bytes that processes hold together.
        sent: how often a process sends a share of all weights, or as many gradients, in a step.
    """

    trainer: str
    whole: int
    shared: int
    sent: int

    def memory(self, weights: float, processes: int) -> float:
        """Bytes of one process on its device."""
        return weights * (self.whole + self.shared / processes)

    def traffic(self, weights: float, processes: int) -> float:
        """Bytes that one process sends in a step."""
        return self.sent * (processes - 1) / processes * 4 * weights


# A weight, its gradient and two moments. Under ZeRO-3 and FSDP a module's weights are gathered for its pass;
# those of a whole drafter are the bound here.
WHOLE = Sharing("ddp", c.TRAINED_BYTES, 0, 2)
OTHERS = (
    Sharing("deepspeed_1", 8, 8, 2),
    Sharing("deepspeed_2", 4, 12, 2),
    Sharing("fsdp", 4, 16, 3),
    Sharing("deepspeed_3", 4, 16, 3),
    Sharing("deepspeed_offload", 4, 4, 2),  # moments are in the host's memory
)
EVERY = (WHOLE, *OTHERS)


def named(strategy: str | Mapping[str, Any]) -> Sharing | None:
    """The sharing of conf/trainer's `strategy`; None: one process, or a trainer that is not known here."""
    if isinstance(strategy, str):
        return None
    kind = str(strategy.get("_target_", "")).rpartition(".")[2]
    if kind == "DeepSpeed":
        stage = "offload" if strategy.get("offload_optimizer") else strategy.get("stage")
        kind = f"deepspeed_{stage}"
    return next((one for one in EVERY if one.trainer == kind.lower()), None)


def line(chosen: Sharing, weights: float, processes: int) -> str:
    """What a drafter takes of each process with this trainer, and with others that share it."""
    sizes = {one.trainer: one.memory(weights, processes) / c.GIB for one in EVERY}
    others = ", ".join(f"{sizes[one.trainer]:.2f} with {one.trainer}" for one in EVERY if one is not chosen)
    return (
        f"drafter and optimizer: {sizes[chosen.trainer]:.2f} GiB of each process (trainer={chosen.trainer}); "
        f"{others}; fsdp and deepspeed_3 send 1.5 times as much"
    )

"""Speed of this machine's devices: its card by name, its processor by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from decode.errors import UserError
from decode.hardware import hardware, memory_bytes
from decode.kernels.half_products import product_dtype
from distill.commands.planning.constants import (
    CARDS,
    CPU_DECODING,
    CPU_DEPTH_SECONDS,
    CPU_FORWARD,
    CPU_LAYER_SECONDS,
    CPU_TRAINING,
    DEFAULT_CARD,
    Card,
    known_card,
)

ROWS, SIZE, MIB = 1024, 1024, 2**20
WINDOW = 1.0  # seconds of each measurement
CPU = torch.device("cpu")


def find_card(name: str | None) -> Card:
    """The card of this name; None: this machine's where it is a known one, else the default.

    Raises:
        UserError: no such card.
    """
    if name is not None:
        if card := CARDS.get(name.lower()):
            return card
        raise UserError(f"card={name}: choose one of {', '.join(CARDS)}")
    if torch.cuda.is_available():
        return known_card(hardware(torch.device("cuda"))) or CARDS[DEFAULT_CARD]
    return CARDS[DEFAULT_CARD]


@torch.inference_mode()
def probe_processor() -> Card:
    """Measure this machine's processor: products and reading, a second of each."""
    dtype = product_dtype(torch.bfloat16, CPU, ROWS)
    left, right = torch.ones(ROWS, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    large = torch.ones(128 * MIB // 4)
    flops = 2 * ROWS * SIZE * SIZE / _seconds(lambda: left @ right)
    bandwidth = 128 * MIB / _seconds(large.sum)
    what = f"this machine's processor ({hardware(CPU)}, {torch.get_num_threads()} threads)"
    return Card(
        what,
        memory=memory_bytes(CPU),
        bandwidth=bandwidth,
        flops=flops,
        link=bandwidth,
        layer_seconds=CPU_LAYER_SECONDS,
        depth_seconds=CPU_DEPTH_SECONDS,
        reading=1.0,  # it is what was reached, not what a data sheet says
        decoding=CPU_DECODING,
        forward=CPU_FORWARD,
        training=CPU_TRAINING,
    )


def _seconds(call: Callable[[], object]) -> float:
    """Mean time of a call over WINDOW seconds: what other processes leave to this one counts."""
    call()
    begun, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < WINDOW:
        call()
        count += 1
    return elapsed / max(1, count)

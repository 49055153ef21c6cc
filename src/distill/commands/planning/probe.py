"""Speed of this machine's devices: its card by name, its processor by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from decode.errors import UserError
from decode.hardware import hardware, memory_bytes
from decode.kernels.half_products import product_dtype
from distill.commands.planning.constants import (
    CARDS,
    CPU_LAYER_SECONDS,
    CPU_STEP_SECONDS,
    DEFAULT_CARD,
    Card,
)

ROWS, SIZE, MIB, TURNS = 1024, 1024, 2**20, 5
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
        words = hardware(torch.device("cuda")).lower().replace(" ", "")
        by_length = sorted(CARDS, key=len, reverse=True)
        found = next((key for key in by_length if key.partition("_")[0] in words), None)
        return CARDS[found or DEFAULT_CARD]
    return CARDS[DEFAULT_CARD]


@torch.inference_mode()
def probe_processor() -> Card:
    """Measure this machine's processor: products and reading, medians of a few turns, in about a second."""
    dtype = product_dtype(torch.bfloat16, CPU)
    left, right = torch.ones(ROWS, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    large = torch.ones(128 * MIB // 4)
    flops = 2 * ROWS * SIZE * SIZE / _seconds(lambda: left @ right)
    bandwidth = 128 * MIB / _seconds(large.sum)
    what = f"this machine's processor ({hardware(CPU)}, {torch.get_num_threads()} threads)"
    return Card(
        what,
        memory_bytes(CPU),
        bandwidth,
        flops,
        bandwidth,
        CPU_LAYER_SECONDS,
        CPU_STEP_SECONDS,
        reading=1.0,  # these are what was reached, not what a data sheet says
        forward=1.0,
        training=1.0,
    )


def _seconds(call: Callable[[], object]) -> float:
    """Median time of a call, after one that is not counted."""
    times = []
    for _ in range(TURNS + 1):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return median(times[1:])

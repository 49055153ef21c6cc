"""How many positions have logits at one time."""

from __future__ import annotations

from decode.hardware import memory_bytes
from decode.model.head import Head

CACHED_BYTES = 2**22  # of one (rows, V) block on a CPU, which should fit the cache
# On a card every chunk reads the head and starts the same kernels, so a block takes this share of the memory.
SHARE = 1 / 64
BLOCKS = 5  # that exist at a time, about
# With fewer rows, reading the head takes most of a product's time; with more, a card gains nothing.
MIN_ROWS, MAX_ROWS = 128, 8192


def rows_on_card(memory: float, vocabulary: int) -> int:
    """Rows of a chunk on a card with this memory in bytes."""
    most = int(memory * SHARE) // (4 * vocabulary) // MIN_ROWS * MIN_ROWS
    return min(MAX_ROWS, max(MIN_ROWS, most))


def logits_rows(head: Head) -> int:
    """Rows of a chunk, by the device and the vocabulary of the target's head."""
    device, vocabulary = head.weight.device, head.weight.shape[0]
    if device.type == "cpu":
        return max(MIN_ROWS, CACHED_BYTES // (4 * vocabulary))
    return rows_on_card(memory_bytes(device), vocabulary)

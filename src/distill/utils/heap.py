"""What the C library does with memory that a process frees."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 32 * 2**20  # bytes of a block that is kept; the most that glibc takes
KEPT = 256 * 2**20  # bytes at the end of the heap that are kept


def keep_freed_memory() -> bool:
    """Let this process keep blocks that it frees, up to `LARGEST` each, instead of giving them back.

    A training step allocates the same blocks again and again. By default glibc returns blocks of this size
    to the kernel, and each page is then faulted in and zeroed again: a tenth of a step. Larger blocks go
    back at once, as before.

    Returns:
        Whether the C library can be told; only glibc can.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS and Windows have none
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))

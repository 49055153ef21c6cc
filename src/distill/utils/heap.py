"""Settings of the C library for freed memory."""

from __future__ import annotations

import ctypes

# Constants of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 32 * 2**20  # largest kept block in bytes (glibc's maximum)
KEPT = 256 * 2**20  # bytes kept at the end of the heap


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to `LARGEST` bytes in this process.

    A training step allocates the same blocks again and again. By default, glibc returns blocks of this size
    to the kernel, and each page is faulted in and zeroed again. Larger blocks are still returned.

    Returns:
        Whether the C library supports it; only glibc does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not available on macOS and Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))

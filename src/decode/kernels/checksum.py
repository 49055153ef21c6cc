"""Checksums over every element of a tensor, by integer reductions on its device.

A tensor is read as 64-bit words. A checksum is the sum modulo 2**64 of all words, each multiplied by an odd
number that depends on its index. So one changed word always changes it. Several changed or swapped words
change it unless their differences cancel, with a probability of about 2**-48. Integer overflow is the same
on every device, so CPU and GPU agree. The checksum does not resist deliberate collisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

WORDS = 2**12  # per block. Words are indexed within a block, and blocks separately.
TASK = 2**8  # blocks per thread at a time, on a CPU
SERIAL = 2**15  # elements from which on torch uses several, busily waiting threads
LAUNCH = 2**10  # blocks per pass on other devices (32 MiB), where a pass costs a launch
NAN = {torch.bfloat16: (0x7F80, 0x7FC0), torch.float16: (0x7C00, 0x7E00)}  # bits of infinity and of our NaN


@torch.no_grad()
def bit_checksum(tensor: Tensor) -> Tensor:
    """() int64 checksum of a tensor's bits, on its device."""
    return _checksum(tensor.detach(), None)


@torch.no_grad()
def value_checksum(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """() int64 checksum of a tensor's values, rounded to a dtype, on the tensor's device.

    The same for all dtypes that hold these values, and for every NaN. 0 and -0 differ. Other types than
    floating-point numbers of at least 16 bits count with their bits.

    Args:
        tensor: of any strides.
        dtype: bfloat16 or float16.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return _checksum(tensor, dtype if has_values(tensor) else None)


def has_values(tensor: Tensor) -> bool:
    """Whether `value_checksum` uses a tensor's values, not its bits."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def _checksum(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Checksum of the bits, after rounding to a dtype if given."""
    size = WORDS * 8 // (tensor.itemsize if dtype is None else dtype.itemsize)  # elements of a block
    on_cpu = tensor.device.type == "cpu"
    parts = pieces(tensor, size * (TASK if on_cpu else LAUNCH))
    step = size if dtype else size * max(1, (SERIAL - 1) // WORDS)
    work = partial(_block_sums, dtype=dtype, step=step if on_cpu else None)
    threads = torch.get_num_threads()
    if on_cpu and threads > 1 and tensor.is_contiguous() and tensor.numel() > size * TASK:
        with ThreadPoolExecutor(threads) as pool:
            sums = [*pool.map(work, parts)]
    else:
        sums = [work(part) for part in parts]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    found = torch.cat(sums)  # (blocks,)
    return (found * _odd(len(found), 1, tensor.device)).sum()


@torch.no_grad()  # applies to this thread
def _block_sums(part: Tensor, dtype: torch.dtype | None, step: int | None) -> Tensor:
    """(blocks,) sums of words of a contiguous part, each multiplied by the number of its index.

    Args:
        part: starts at the beginning of a block.
        dtype: to round to; None: the bits are read.
        step: elements per pass, a multiple of a block; None: all.
    """
    table, sums = _odd(WORDS, 0, part.device), []
    for piece in part.split(step or len(part)):
        words = _words(piece if dtype is None else _rounded(piece, dtype))
        whole = len(words) // WORDS * WORDS
        if whole:
            sums.append((words[:whole].view(-1, WORDS) * table).sum(1))
        if whole < len(words):
            sums.append((words[whole:] * table[: len(words) - whole]).sum()[None])
    return torch.cat(sums)


def pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """A tensor's elements in order, as contiguous pieces of `size` elements; the last may be shorter.

    Copies take the memory of one piece, for all strides.
    """
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(size) if tensor.numel() else ()
        return
    held: list[Tensor] = []
    count = 0
    for part in _contiguous(tensor, size):
        rest = part
        while len(rest):
            first, rest = rest[: size - count], rest[size - count :]
            held.append(first)
            count += len(first)
            if count == size:
                yield torch.cat(held)
                held, count = [], 0
    if held:
        yield torch.cat(held)


def _contiguous(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """A tensor's elements in order, as pieces of at most `size`."""
    if tensor.numel() <= size:
        yield tensor.reshape(-1)
    elif (row := tensor[0].numel()) > size:
        for part in tensor:
            yield from _contiguous(part, size)
    else:
        for rows in tensor.split(size // row):
            yield rows.reshape(-1)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """(N,) values -> (N,) int16 bits in a dtype of 16 bits, with one NaN."""
    infinity, nan = NAN[dtype]
    if values.dtype == dtype or dtype == torch.float16:
        bits = values.to(dtype).view(torch.int16)
        return bits.masked_fill((bits & 0x7FFF) > infinity, nan)
    # Rounded with integers, because some processors flush subnormal numbers when they round.
    wide = values.to(torch.float32).view(torch.int32)
    halfway = (wide >> 16).bitwise_and_(1).add_(0x7FFF)  # to the even neighbour
    bits = halfway.add_(wide).bitwise_right_shift_(16)
    return bits.masked_fill_((wide & 0x7FFFFFFF) > 0x7F800000, nan).to(torch.int16)


def _words(piece: Tensor) -> Tensor:
    """(N,) elements -> (M,) int64, with the last word padded with zeros."""
    found = piece.view(torch.uint8)
    if found.numel() % 8:
        found = torch.nn.functional.pad(found, (0, -found.numel() % 8))
    if found.storage_offset() % 8:
        found = found.clone()
    return found.view(torch.int64)


@lru_cache(maxsize=128)
def _odd(count: int, stream: int, device: torch.device) -> Tensor:
    """(count,) int64 pseudorandom odd numbers: splitmix64 of indices (Steele et al., OOPSLA 2014)."""
    golden, first = np.uint64(0x9E3779B97F4A7C15), np.uint64(2**40 * stream + 1)
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + first) * golden
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    with torch.inference_mode(False):  # cached, so it must be usable outside inference mode
        return torch.from_numpy(odd.view(np.int64)).to(device)

"""GPUs that an engine's interpreter sees, and the arguments of vLLM that spread a target over them."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from decode.errors import UserError
from distill.engines.launch import environment

PROBE = """
import json, torch
print(json.dumps([torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]))
"""
PROBE_SECONDS = 300.0  # the first import of torch from a network disk takes minutes
MOST = 0.9  # of a GPU's memory, vLLM's own default
SPARE = 0.03  # of a GPU's memory, for the contexts of processes that start meanwhile
WEIGHTS = 0.7  # most of vLLM's memory that weights may take: the rest is for the cache and activations


class Gpu(NamedTuple):
    """Memory of a GPU, in bytes."""

    free: int
    total: int


class Spread(NamedTuple):
    """How a target is spread over GPUs.

    Attributes:
        arguments: arguments of `vllm serve`.
        copies: of the target, each of which answers requests.
    """

    arguments: list[str]
    copies: int


def visible_gpus(python: Path) -> list[Gpu]:
    """GPUs of this machine as the torch of an interpreter sees them; empty without CUDA.

    Another process looks, since a process that asks for a GPU's memory keeps some of it.

    Raises:
        UserError: torch cannot be imported there.
    """
    command = [python, "-c", PROBE]
    try:
        found = subprocess.run(
            command, env=environment({}), capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = " ".join(str(error).split())
    else:
        with suppress(IndexError, ValueError):
            return [Gpu(*memory) for memory in json.loads(found.stdout.splitlines()[-1])]
        reason = (found.stderr.strip().splitlines() or ["no output"])[-1]
    raise UserError(f"rollout.engine_python={python}: cannot look for GPUs there: {reason}")


def spread(gpus: Sequence[Gpu], weights: int, heads: int, given: Sequence[str] = ()) -> Spread:
    """Choose data-parallel and tensor-parallel sizes and vLLM's share of the memory.

    As few GPUs as possible hold a copy of the target, since copies need not wait for one another.

    Args:
        gpus: GPUs of the machine.
        weights: bytes of the target's weights.
        heads: attention heads of the target, which tensor-parallel GPUs share equally.
        given: arguments of the user; sizes among them stay as they are.

    Raises:
        UserError: the target does not fit into the free memory.
    """
    known = _given(given)
    if not gpus:
        return Spread([], known.data_parallel_size or 1)
    arguments = list[str]()
    share = known.gpu_memory_utilization
    if share is None:
        least = min(gpu.free / gpu.total for gpu in gpus)
        share = max(0.0, int(100 * min(MOST, least - SPARE)) / 100)
        arguments.append(f"--gpu-memory-utilization={share:g}")
    if known.tensor_parallel_size or known.data_parallel_size:
        return Spread(arguments, known.data_parallel_size or 1)
    room = share * min(gpu.total for gpu in gpus) * WEIGHTS
    sizes = [n for n in range(1, len(gpus) + 1) if len(gpus) % n == 0 and heads % n == 0]
    size = next((n for n in sizes if weights / n <= room), None)
    if size is None:
        free = min(gpu.free for gpu in gpus)
        raise UserError(
            f"rollout=vllm: weights of {weights / 2**30:.1f} GiB do not fit on {len(gpus)} GPU"
            f"{'s' * (len(gpus) > 1)} with {free / 2**30:.1f} GiB free (at most {WEIGHTS:.0%} of vLLM's "
            "memory); end what uses them, or set sizes or --quantization in rollout.engine_arguments"
        )
    copies = len(gpus) // size
    arguments += [f"--tensor-parallel-size={size}"] * (size > 1)
    arguments += [f"--data-parallel-size={copies}"] * (copies > 1)
    return Spread(arguments, copies)


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    """Sizes in arguments of `vllm serve`.

    Raises:
        UserError: a size that is no number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int)
    parser.add_argument("--data-parallel-size", "-dp", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    try:
        return parser.parse_known_args(list(arguments))[0]
    except argparse.ArgumentError as error:
        raise UserError(f"rollout.engine_arguments: {error}") from None

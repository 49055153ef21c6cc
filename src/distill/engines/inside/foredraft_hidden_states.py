"""A vLLM connector that writes hidden states to files, on devices with and without CUDA.

vLLM's `ExampleHiddenStatesConnector` (0.32) needs `torch.cuda.Stream`, which CPU builds lack, and writes
under the final name. This connector works on any device, and renames complete files. vLLM loads it by name
(`kv_connector_module_path`) with this folder on PYTHONPATH; it needs the speculative method
`extract_hidden_states`.

A file has `hidden_states` (n, L, D), in the order of the layers, and `token_ids` (n,).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    ExampleHiddenStatesConnector,
)


class Copied:
    """Replaces the CUDA event of a finished copy."""

    def query(self) -> bool:
        """Whether the copy is finished."""
        return True

    def synchronize(self) -> None:
        """Wait for it."""


class ForedraftHiddenStates(ExampleHiddenStatesConnector):
    """Writes the hidden states of each request to `<shared_storage_path>/<request>.safetensors`."""

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        # private API: the only step of the connector that names the file
        try:
            event.synchronize()
            save_file(tensors, f"{filename}.part")
            Path(f"{filename}.part").replace(filename)
        finally:
            if lock_fd is not None:
                os.close(lock_fd)  # also releases the lock

    def _submit_async_write(self, pending: Any) -> None:
        # private API: the only step of the connector that copies
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:  # private API: as above, and so below
            return
        blocks = self._kv_cache[torch.tensor(pending.block_ids)]  # (blocks, L, block size, D)
        states = blocks.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)].contiguous()  # (n, L, D)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        # private API: what that step does on a GPU
        lock = self._lock_fds.pop(pending.req_id, None)
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        # private API: what the connector waits for
        self._req_copy_events[pending.req_id] = Copied()
        write = self._executor.submit(self._write_tensors, tensors, Copied(), pending.filename, lock)
        # private API: what the connector waits for, too
        self._req_futures[pending.req_id] = write
        # private API: what the connector does then
        write.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))

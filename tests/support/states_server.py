"""A server that also writes hidden states to files, as vLLM does; the target runs in this process."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from fake_server import FakeServer
from safetensors.torch import save_file

from decode.model.causal_lm import record_inputs
from decode.model.head_target import final_norm
from decode.model.target import Target


class StatesServer(FakeServer):
    """Reads the prompt, and the answer where the request wants that, as the target does.

    Args:
        chat: see `FakeServer`.
        target: that it serves.
        folder: for its files.
        layers: whose inputs it writes; the number of layers stands for the last one's output.
    """

    def __init__(self, chat: Any, target: Target, folder: Path, layers: tuple[int, ...], **more: Any) -> None:
        super().__init__(chat, **more)
        self.target, self.folder, self.layers = target, folder, layers
        self.read: list[list[int]] = []  # texts that it was asked to read
        self.left = 10**9  # of these, until it is killed
        self.damage: list[Callable[[dict[str, Any]], dict[str, Any]]] = []  # to the files to come, one each
        self.writes = True
        self.names = count()  # of its files
        self.reading = threading.Lock()  # hooks of one request see no other

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        reads = body["max_tokens"] == 1 and body.get("logprobs") == 1
        said = super().reply(body)
        (choice,) = said["choices"]
        text = list(said.get("prompt_token_ids", []))
        if reads:
            with self.lock:
                self.left -= 1
                self.read.append(text)
            if self.left < 0:
                raise ConnectionError
        elif (body.get("kv_transfer_params") or {}).get("include_output_tokens"):
            text += choice["token_ids"][:-1]
        with self.reading:
            states, logprobs = self.states(text)
        choice["logprobs"] = {"token_logprobs": [float(logprobs.max())]}
        if reads:
            choice["token_ids"] = [int(logprobs.argmax())]
        if self.writes:
            path = self.folder / f"cmpl-{next(self.names)}.safetensors"
            file = {"hidden_states": states, "token_ids": torch.tensor(text)}
            with Path(f"{path}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                save_file(self.damage.pop(0)(file) if self.damage else file, path)
            said["kv_transfer_params"] = {"hidden_states_path": f"/on/another/machine/{path.name}"}
        return said

    @torch.no_grad()
    def states(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, L, D) of a text, and (V,) log-probabilities of what follows."""
        target, found = self.target, dict.fromkeys(range(len(self.target.layers)), torch.empty(0))
        handle = final_norm(target).register_forward_pre_hook(
            lambda module, args: found.__setitem__(len(target.layers), args[0])
        )
        with record_inputs(target.layers, found):
            last = target.base(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
        handle.remove()
        states = torch.stack([found[layer][0] for layer in self.layers], 1)
        return states.contiguous(), target.head(last[0, -1]).float().log_softmax(-1)

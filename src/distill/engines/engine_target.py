"""The target of `taps=engine`: vLLM runs the layers; this process has embedding, final norm and head."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decode.errors import UserError
from decode.model.head_target import HeadTarget
from decode.model.target import Tap, TargetOutput
from distill.engines import inside
from distill.engines.hidden_states import KEPT, HiddenStates, check_rows
from distill.engines.http import Server
from distill.engines.launch import interpreter
from distill.engines.openai import OpenAIEngine
from distill.engines.vllm import PACKAGE, SERVER, VLLM
from distill.options.answers import TargetOptions
from distill.options.run import EngineOptions
from distill.prompts.chat_template import Chat
from distill.utils.paths import bundled
from distill.utils.progress import say

CONNECTOR = "foredraft_hidden_states"  # module and class of `inside`
PROBE = 4, 16  # number and length of the texts that test the engine
# Largest median difference of log-probabilities, in nats: both sides round logits of up to 32 to bf16, by
# 0.06 each; another norm, layer or head is several nats off.
BOUND = 0.25
GONE = 15.0  # seconds without an answer after which the run's engine counts as ended
ANSWERED = {"kv_transfer_params": {"include_output_tokens": True}}  # include states of the answer


class EngineTarget(HeadTarget):
    """A target that gets hidden states and rollouts from an engine.

    The engine is started or contacted at the first request.
    """

    read_ahead = 2**15
    _connection: tuple[tuple[int, ...], HiddenStates] | None = None

    def serve_with(
        self, options: EngineOptions, target: TargetOptions, folder: Path, gigabytes: float
    ) -> None:
        """Set how the engine is reached.

        Args:
            options: options of the engine.
            target: model that the engine loads.
            folder: folder for log and files of a started engine.
            gigabytes: limit on stored hidden states of answers, which are kept until their rows are read.
        """
        self._engine, self._options, self._folder, self._limit = options, target, folder, gigabytes
        self._stack = ExitStack()
        self.source = f"engine {options.model or target.name} {' '.join(map(str, options.arguments))}".strip()

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layer ids that the engine writes; the number of layers denotes the last layer's output."""
        if self._engine.layers:
            return tuple(sorted(set(self._engine.layers)))
        return tuple(sorted({*(tap for tap in self.taps if isinstance(tap, int)), len(self.layers)}))

    @override
    def tap(self, taps: Sequence[Tap]) -> None:
        super().tap(taps)
        given = getattr(getattr(self, "_engine", None), "layers", None)
        needed = {*(tap for tap in taps if isinstance(tap, int)), len(self.layers)}
        if given and (missing := sorted(needed - set(given))):
            raise UserError(
                f"engine.layers={list(given)}: lacks {missing}, which the drafter reads ({len(self.layers)} "
                f"is the last layer's output); start the engine with {sorted(needed | set(given))}"
            )

    @override
    def read(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> TargetOutput:
        """Like `Target.read`, by the engine; outputs at padding are 0.

        The last output of a text that fills the context is 0 too, since no token can follow.

        Raises:
            UserError: the engine is missing, or runs another model.
        """
        most = (self.max_positions or tokens.shape[1] + 1) - 1
        ends = [min(n, most) for n in lengths or [tokens.shape[1]] * len(tokens)]
        layers, client = self._connected()
        reads = client([row[:end].tolist() for row, end in zip(tokens, ends, strict=True)])
        check_rows(reads, self._logprob, BOUND)
        states = tokens.new_zeros(
            *tokens.shape, len(layers), self.hidden_size, dtype=self.dtype
        )  # (B, T, S, D)
        last = states[:, :, -1].clone()
        for row, (read, end) in enumerate(zip(reads, ends, strict=True)):
            states[row, :end] = read.states.to(self.device, self.dtype)
            last[row, :end] = self._normed(states[row, :end, -1])
        return self._output(last, {layer: states[:, :, i] for i, layer in enumerate(layers)})

    def answers(self, chat: Chat, seed: int) -> OpenAIEngine:
        """Build a rollout engine on this server; keeps the hidden states of its answers."""
        _, client = self._connected()
        return OpenAIEngine(client.server, chat, seed, self.max_positions, ANSWERED, client)

    @override
    def rest(self) -> None:
        """Stop the engine if the run has started it; the next request starts it again."""
        self._stack.close()
        if self._connection:
            self._connection[1].forget()
        self._connection = None

    @torch.no_grad()
    def _normed(self, states: Tensor) -> Tensor:
        return self.norm(states)

    @torch.no_grad()
    def _logprob(self, states: Tensor, token: int) -> float:
        """Log-probability of a token by the head on (S, D) states of one position."""
        if token >= self.vocab_size:
            raise UserError(f"taps=engine: the engine sent token {token}, the target has {self.vocab_size}")
        last = self.norm(states[-1].to(self.device, self.dtype))
        return float(self.head(last).float().log_softmax(-1)[token])

    def _connected(self) -> tuple[tuple[int, ...], HiddenStates]:
        """Return layer ids and client; restarts the run's own engine if its layers differ."""
        layers = self.layers_read
        if self._connection and self._connection[0] == layers:
            return self._connection
        self.rest()
        options, name = self._engine, str(bundled(self._options.name))
        if options.url:
            url, folder, patience = options.url, Path(options.folder or ""), options.patience
            model = options.model or self._options.name
        else:
            url, folder = self._start(layers), self._folder / "states"
            patience, model = GONE, options.model or name
        server = Server(
            url,
            model,
            options.concurrency,
            options.timeout,
            options.retries,
            patience,
            options.api_key_env,
            "engine.",
        )
        restart = f"start it with {' '.join(states_arguments(layers, 'FOLDER'))} (docs/engine_taps.md)"
        shape = len(layers), self.hidden_size
        client = HiddenStates(server, folder, shape, self._limit * 2**30, restart)
        texts, size = PROBE
        probe = (torch.arange(texts * size) * 7919 % self.vocab_size).view(texts, size).tolist()
        off = check_rows(client(probe), self._logprob, BOUND)
        say(f"taps=engine: {url} answers; log-probabilities {off:.3f} nats from the head here")
        self._connection = layers, client
        return self._connection

    def _start(self, layers: Sequence[int]) -> str:
        """Start the engine; returns its url."""
        options, states = self._engine, self._folder / "states"
        engine = VLLM(options.python or "", options.arguments, options.patience, "engine.python")
        states.mkdir(parents=True, exist_ok=True)
        for path in states.iterdir():  # left by a killed engine
            if not path.match(KEPT.format("*")):
                path.unlink()
        log = self._folder / "engine.log"
        say(f"taps=engine: starting {SERVER}; its output is in {log}")
        waiting = time.perf_counter()
        begun = engine.serve_target(
            self._options,
            options.model or str(bundled(self._options.name)),
            log,
            "--no-enable-prefix-caching",
            *states_arguments(layers, str(states.absolute())),
            variables={"PYTHONPATH": str(Path(inside.__path__[0]).absolute())},
        )
        url = f"{self._stack.enter_context(begun).url}/v1"
        self.starting_seconds += time.perf_counter() - waiting
        return url


def load_engine_target(
    engine: EngineOptions, target: TargetOptions, device: torch.device, folder: Path, gigabytes: float
) -> EngineTarget:
    """Load the parts of a target that this process needs; arguments as in `serve_with`.

    Raises:
        UserError: see `HeadTarget.load`; no interpreter with vLLM.
    """
    if engine.python:
        interpreter(engine.python, PACKAGE, "engine.python")
    where = str(bundled(target.name)), target.dtype, device, target.revision, target.trust_remote_code
    result = EngineTarget.load(*where)
    result.serve_with(engine, target, folder, gigabytes)
    return result


def states_arguments(layers: Sequence[int], folder: str) -> list[str]:
    """Arguments of `vllm serve` that write hidden states of layers to a folder."""
    settings: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": settings},
    }
    transfer = {
        "kv_connector": "ForedraftHiddenStates",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]

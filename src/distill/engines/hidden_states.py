"""Client of a server that writes the hidden states of prompts to a shared folder.

Needs vLLM 0.32 with the speculative method `extract_hidden_states` and a connector of hidden states: vLLM's
own `ExampleHiddenStatesConnector` (the base of speculators' package hs-connectors), or `inside/`, which also
runs on CPUs. Each response names a file; `inside/foredraft_hidden_states.py` describes its content.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from distill.engines.http import RefusedError, RetryPolicy, Server, TransientError
from distill.engines.unnamed_files import KEPT, UnnamedFiles
from drafters.checkpoint.atomic import publish

WRITES = 30.0  # seconds to wait for a file after the response
FEW = 4  # fewer texts show only rounding differences
LATE = 2.0  # seconds to wait at the end for files of abandoned requests
LONGEST = 255  # maximum bytes of a file's name


class Read(NamedTuple):
    """An engine's output for a text.

    Attributes:
        states: (n, L, D) outputs of the configured layers, ascending.
        token: most likely next token; None if the states were stored while answering.
        logprob: log-probability of that token.
    """

    states: Tensor
    token: int | None = None
    logprob: float = 0.0


class HiddenStates:
    """Requests the hidden states of texts, and keeps those that come with answers.

    Args:
        server: connection.
        folder: folder with the engine's files, as this machine sees it.
        layers: number of layers that the engine writes, and the hidden size.
        limit: maximum bytes of kept files.
        restart: advice for errors about an engine with missing or wrong hidden states.
    """

    def __init__(
        self, server: Server, folder: Path, layers: tuple[int, int], limit: float, restart: str
    ) -> None:
        self.server, self.folder, self.shape, self.limit = server, folder, layers, limit
        self.restart = restart
        self.retry = RetryPolicy(str(server), server.patience, server.retries, server.group)
        self.answered = False
        self.unnamed = UnnamedFiles(folder)
        self.size = sum(path.stat().st_size for path in folder.glob(KEPT.format("*")))  # bytes of kept files

    def __call__(self, texts: Sequence[list[int]]) -> list[Read]:
        """Return the states of each text, in order; texts that the engine wrote are read from kept files.

        Raises:
            UserError: the engine is missing or misconfigured.
        """
        with self.asking(self.retry):
            return asyncio.run(self._all(texts))

    def asking(self, retry: RetryPolicy) -> AbstractContextManager[None]:
        """Context in which requests run; see `UnnamedFiles`."""
        return self.unnamed.asking(retry)

    def keep(self, path: str) -> None:
        """Name the file of an answer after its tokens, within the limit.

        Raises:
            UserError: invalid file name.
        """
        file = self._local(path)
        with suppress(OSError, KeyError, SafetensorError):  # otherwise read again
            _wait(file)
            size = file.stat().st_size
            if self.size + self.unnamed.size + size <= self.limit:
                with safe_open(file, "pt") as content:
                    tokens = content.get_tensor("token_ids").tolist()
                file.rename(self._kept(tokens))
                self.size += size
        self._remove(file)

    def _save(self, tokens: Sequence[int], states: Tensor) -> None:
        """Keep the states of a text if other texts failed."""
        if self.size + self.unnamed.size + states.nbytes <= self.limit:
            with publish(self._kept(tokens)) as file:
                save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, file)
            self.size += self._kept(tokens).stat().st_size

    def forget(self) -> None:
        """Remove remaining kept files, which nobody requested, and unnamed files."""
        self.unnamed.end(LATE)
        for path in self.folder.glob(KEPT.format("*")):
            path.unlink(missing_ok=True)
        self.size = 0

    def _kept(self, tokens: Sequence[int]) -> Path:
        return self.folder / KEPT.format(hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:32])

    async def _all(self, texts: Sequence[list[int]]) -> list[Read]:
        slots, reads = asyncio.Semaphore(self.server.concurrency), dict[int, Read]()

        async def one(client: Any, i: int) -> None:
            async with slots:
                reads[i] = self._from_kept(texts[i]) or await self._retried(client, texts[i])

        async with self.server.client() as client:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for i in range(len(texts)):
                        tasks.create_task(one(client, i))
            except BaseExceptionGroup as failed:
                for i, read in reads.items():
                    self._save(texts[i], read.states)
                raise failed.exceptions[0] from None
        return [reads[i] for i in range(len(texts))]

    def _from_kept(self, tokens: list[int]) -> Read | None:
        path = self._kept(tokens)
        if not path.exists():
            return None
        self.size -= path.stat().st_size
        try:
            return Read(self._load(path, tokens))
        except (TransientError, UserError):  # damaged, or of other layers: read again
            return None
        finally:
            path.unlink()

    async def _retried(self, client: Any, tokens: list[int]) -> Read:
        try:
            return await self.retry(lambda: self._ask(client, tokens))
        except RefusedError as refusal:
            raise UserError(f"{self.server}: refuses a text of {len(tokens)} tokens ({refusal})") from None

    async def _ask(self, client: Any, tokens: list[int]) -> Read:
        async with self.server.understood(not self.answered, self.answered):
            raw = await client.completions.with_raw_response.create(
                model=self.server.model,
                prompt=tokens,
                max_tokens=1,
                temperature=0,
                logprobs=1,
                extra_body={"return_token_ids": True},
            )
            try:
                payload = json.loads(raw.http_response.text)
                choice = payload["choices"][0]
                named = (payload.get("kv_transfer_params") or {}).get("hidden_states_path")
                token, logprob = choice["token_ids"][0], float(choice["logprobs"]["token_logprobs"][0])
                if type(token) is not int or token < 0:
                    raise ValueError(f"token {token!r}")
            except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
                raise TransientError(f"a reply that makes no sense ({error!r})", True) from None
        self.answered = True
        if not isinstance(named, str):
            raise UserError(f"{self.server}: it writes no hidden states; {self.restart}")
        path = self._local(named)
        try:
            await asyncio.to_thread(_wait, path)
            return Read(self._load(path, tokens), token, logprob)
        finally:
            self._remove(path)

    def _local(self, path: str) -> Path:
        """The engine's file on this machine; only the name of its path is trusted.

        Raises:
            UserError: invalid file name.
        """
        name = Path(path).name
        if name in ("", "..") or not name.isprintable() or len(f"{name}.lock".encode()) > LONGEST:
            raise UserError(f"{self.server}: {path[:80]!r} is no file of hidden states; is it an engine?")
        return self.folder / name

    def _remove(self, path: Path) -> None:
        for name in (path, Path(f"{path}.lock")):
            name.unlink(missing_ok=True)

    def _load(self, path: Path, tokens: Sequence[int]) -> Tensor:
        """Load the (n, L, D) states of a file and check that they belong to these tokens."""
        if not path.exists():
            raise UserError(
                f"{self.server.group}folder={self.folder}: the engine wrote {path.name}, which is not "
                "there; give the folder as this machine sees it, or look into the engine's output"
            )
        try:
            file = load_file(path)
            states, read = file["hidden_states"], file["token_ids"].tolist()
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise TransientError(f"a damaged file of hidden states ({error})", True) from None
        count, size = self.shape
        if states.dim() != 3 or states.shape[1:] != (count, size) or states.itemsize < 2:
            raise UserError(
                f"{self.server}: it writes {tuple(states.shape[1:])} of {states.dtype} for a token, "
                f"not {(count, size)} in 16 bits; {self.restart}"
            )
        if read != list(tokens) or len(states) != len(read):
            raise TransientError("hidden states of other tokens", True)
        return states


def _wait(path: Path) -> None:
    """Wait until a file is complete, as its lock shows; without a lock, wait up to `WRITES` seconds."""
    until = time.monotonic() + WRITES
    while True:
        with suppress(FileNotFoundError), Path(f"{path}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        # A connector without locks renames complete files.
        if path.exists() or time.monotonic() > until:
            return
        time.sleep(0.1)


def check_rows(reads: Sequence[Read], logprob: Callable[[Tensor, int], float], bound: float) -> float:
    """Median difference between the engine's log-probabilities of several texts and those of the local head.

    Args:
        reads: reads with tokens.
        logprob: maps last (L, D) states of a text and a token to a log-probability.
        bound: largest allowed difference, in nats.

    Raises:
        UserError: above the bound: head, norm or layer differ from the engine's.
    """
    asked = [read for read in reads if read.token is not None]
    off = sorted(abs(logprob(read.states[-1], read.token or 0) - read.logprob) for read in asked)
    middle = off[len(off) // 2] if len(off) >= FEW else 0.0
    if not middle <= bound:
        raise UserError(
            f"taps=engine: the target's head on the engine's hidden states is {middle:.2f} nats off the "
            f"engine's own log-probabilities, where rounding explains {bound}; is it the same model, and "
            "do engine.layers name its last layer?"
        )
    return middle

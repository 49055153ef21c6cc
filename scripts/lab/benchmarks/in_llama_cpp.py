"""llama.cpp's server as contenders of a race: plain, and with drafts that it copies from its texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vs_transformers import WARM_UP, Contender, Text
from decode.errors import UserError
from decode.model import gguf
from decode.sampling import Sampler
from distill.engine_costs.in_llama_cpp import LlamaCppDecoder, Serving, started
from distill.engines.llama_cpp import LlamaCpp

OPTION = "llama_cpp"
PLAIN = "plain"
# name -> arguments of llama-server; lengths of n-grams and drafts are its defaults
KINDS = {
    PLAIN: (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
}
NO_CACHE = ("--cache-ram", "0")  # else it copies each prompt's keys and values, which takes time
SPARE = 64  # tokens of context for the longest draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An installation of llama.cpp and the file that it serves.

    Attributes:
        installation: the installation.
        file: GGUF file of the target.
    """

    installation: LlamaCpp
    file: Path

    def told(self, threads: int, clock: str) -> dict[str, Any]:
        """What a result file says about its rows."""
        build = self.installation.build()
        return {"build": build, "file": self.file.name, "threads": threads, "clock": clock}


def peer(python: str | None, target: str) -> Peer | None:
    """Check the option before a target is loaded; None where it is not given.

    Args:
        python: interpreter of an environment that has xllamacpp.
        target: path of the target.

    Raises:
        UserError: no interpreter, one without the package, or a target that is no GGUF file.
    """
    if not python:
        return None
    if (file := gguf.find(target)) is None:
        raise UserError(
            f"{OPTION}: target={target} is no GGUF file, and llama.cpp reads no other; "
            "give target=/path/model.gguf"
        )
    return Peer(installation=LlamaCpp(python, option=OPTION), file=file.absolute())


@contextmanager
def contenders(
    served: Peer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    most: int | None,
    sampler: Sampler,
    ends: bool,
    threads: int,
    on_cpu_time: bool,
    logs: Path,
) -> Iterator[list[Contender]]:
    """Servers of all `KINDS`, which end with the context.

    A server is started anew for each repeat, since `ngram-mod` drafts from all that it answered, and so
    would copy its own answers to the same prompts.

    Args:
        served: installation and file.
        prompts: token ids, whose longest decides the context.
        max_new_tokens: of each text.
        most: positions of the target; None: no limit.
        sampler: temperature and filters.
        ends: end at an end token of the file.
        threads: of each server.
        on_cpu_time: time each by the CPU time of its process; otherwise by the race's clock.
        logs: folder of their output.
    """
    room = max(map(len, prompts)) + max_new_tokens + SPARE
    filters = {"temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p}
    serving = Serving(
        installation=served.installation,
        target=served.file,
        command="",
        context=min(room, most or room),
        batch=1,
        folder=logs,
        sampler=filters | {"min_p": sampler.min_p},
        threads=threads,
    )
    with ExitStack() as stack:
        servers = [_Server(serving, name, ends, most) for name in KINDS]
        for server in servers:
            stack.callback(server.close)
        yield [
            Contender(
                f"llama.cpp-{server.name}",
                server.decode,
                clock=server.cpu_seconds if on_cpu_time else None,
                prepare=_preparation(server, prompts[0], max_new_tokens),
                alike=False,
            )
            for server in servers
        ]


def _preparation(server: _Server, prompt: Sequence[int], max_new_tokens: int) -> Callable[[], None]:
    """Start a server anew, and warm it up with a text that is in no prompt, so that it copies none of it."""

    def prepare() -> None:
        server.start()
        server.decode(prompt[::-1], min(WARM_UP, max_new_tokens))

    return prepare


class _Server:
    """A server that can be started anew.

    Args:
        serving: how it is started.
        name: one of `KINDS`.
        ends: end at an end token of the file.
        most: positions of the target; None: no limit.
    """

    def __init__(self, serving: Serving, name: str, ends: bool, most: int | None) -> None:
        self.serving, self.name, self.ends, self.most = serving, name, ends, most
        self._open = ExitStack()
        self._decoder: LlamaCppDecoder | None = None

    def start(self) -> None:
        """End the last server and start another.

        Raises:
            UserError: see `launch.serve`.
        """
        self.close()
        words = [*KINDS[self.name], *NO_CACHE]
        self._decoder = self._open.enter_context(started(self.serving, words, self.name))

    def close(self) -> None:
        """End the server."""
        self._decoder = None
        self._open.close()

    def cpu_seconds(self) -> float:
        """CPU time of the running server, in s."""
        assert self._decoder
        return self._decoder.running.cpu_seconds()

    def decode(self, prompt: Sequence[int], length: int) -> Text:
        """One call; a text that ended early does not say how many drafted tokens were kept before its end."""
        assert self._decoder
        if self.most is not None:
            length = min(length, self.most - len(prompt))
        answer = self._decoder.complete(prompt, length, ends=self.ends)
        counted = self.name != PLAIN and len(answer.tokens) == length
        # Without a draft the counts are left out.
        accepted = int(answer.timings.get("draft_n_accepted", 0)) if counted else None
        return Text(answer.tokens, [], accepted)

"""Start a server in another interpreter, and end it with this process.

An engine has its own dependencies (vLLM 0.32 needs an older transformers), so it runs in its own environment;
requests use loopback.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import OpenerDirector, ProxyHandler, build_opener

from decode.errors import UserError
from distill.engines.http import openai, within
from distill.utils.progress import say
from distill.utils.thread_spinning import chosen_here

# Runs the server as `python -m` in the engine's interpreter. Its process group is killed when our end of the
# pipe closes, which the kernel does however this process ends.
GUARD = """
import os, runpy, signal, sys, threading
def guard():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=guard, daemon=True).start()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
HOST = "127.0.0.1"
POLL, GRACE = 0.25, 20.0  # seconds between checks of a starting server; seconds for an orderly end
ENDING = 5.0  # seconds to wait for the exit of a server that stopped answering
LAST, SHOWN = 8, 200  # last lines of a log that are printed, and characters of each
# Marks of error lines in a log; the last two are llama.cpp's.
WRONG = ("Error:", "error:", "Exception:", "error loading model:", "GGML_ASSERT(")
OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")  # variables of this interpreter
# Variables of vLLM. The last two are read only by CPU builds: GiB of the cache, which would otherwise take
# nearly all memory, and no reserved cores.
VLLM_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
CPU_CLOCK = 2  # of Linux's clocks of a process: the time that it was scheduled
NO_PROXY = ProxyHandler({})  # no proxy for loopback


def interpreter(python: str, module: str, option: str) -> Path:
    """Check that an interpreter can find a module.

    Args:
        python: path of the interpreter.
        module: top-level name; it is searched, not imported, since an import may take a minute.
        option: option that names the interpreter, for messages.

    Raises:
        UserError: no interpreter, or one without the module.
    """
    path = Path(python).expanduser()
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        code = subprocess.run(
            [path, "-c", look], env=environment({}), capture_output=True, timeout=60
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        raise UserError(f"{option}={python}: no interpreter; give the path of bin/python") from None
    if code:
        raise UserError(f"{option}={python}: has no package {module}; install it there, or give another")
    return path.absolute()


class Installation:
    """An environment that has an engine; subclasses name its package.

    Args:
        python: its interpreter.
        arguments: arguments of every server.
        patience: seconds until a server must be ready.
        option: option that names the interpreter, for messages.

    Raises:
        UserError: no interpreter, or one without the package; no client library here to ask its server.
    """

    package: ClassVar[str]

    def __init__(
        self,
        python: str,
        arguments: Sequence[str] = (),
        patience: float = 900.0,
        option: str = "score.engine_python",
    ) -> None:
        openai()
        self.python = interpreter(python, self.package, option)
        self.arguments, self.patience = list(map(str, arguments)), patience


def version_of(python: Path, package: str) -> str:
    """Version of a package in an interpreter's environment; empty if it has none.

    Args:
        python: from `interpreter`.
        package: name of the distribution.
    """
    show = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run(
        [python, "-c", show], env=environment({}), capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment without this interpreter's variables, plus `more` variables unless they are set."""
    ours = {*OURS, *chosen_here()}
    return {**more, **{name: value for name, value in os.environ.items() if name not in ours}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that is ready.

    Attributes:
        url: of the server.
        pid: of its process, which has ended once the server's context has.
    """

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time of the process and all its threads so far, in s.

        Raises:
            UserError: the process ended, or the system has no such clock.
        """
        if sys.platform != "linux":
            raise UserError("CPU time of a server: only Linux has a clock of another process")
        try:
            # As glibc's clock_getcpuclockid, which Python lacks: nanoseconds, where /proc has hundredths.
            return time.clock_gettime(~self.pid << 3 | CPU_CLOCK)
        except OSError:
            raise UserError(f"{self.url}: the server has ended") from None


@contextmanager
def serve(
    python: Path,
    module: str,
    arguments: Sequence[str],
    log: Path,
    *,
    patience: float,
    variables: Mapping[str, str],
) -> Iterator[Running]:
    """Start a server; yields it.

    Args:
        python: interpreter that has the module.
        module: run as `python -m`; takes `--host` and `--port`, and answers /health once it is ready.
        arguments: arguments of the module.
        log: file for its output, overwritten.
        patience: seconds until it must be ready.
        variables: environment variables, unless they are set.

    Raises:
        UserError: the server ended or was not ready in time; the message has the log's first error. Also if
            it ended and the block failed.
    """
    port = _free_port()
    command = [python, "-c", GUARD, module, *arguments, "--host", HOST, "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(variables),
            start_new_session=True,
        )
    url = f"http://{HOST}:{port}"
    try:
        _wait(process, url, log, patience, module)
        try:
            yield Running(url=url, pid=process.pid)
        except UserError as error:
            with suppress(subprocess.TimeoutExpired):  # it may be about to end
                process.wait(ENDING)
                message = f"{module}: ended while it answered: {_reason(log)}; see {log}"
                raise UserError(message) from error
            raise
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, patience: float, module: str) -> None:
    """Wait until the server is ready."""
    opener, begun = build_opener(NO_PROXY), time.monotonic()
    announced = begun
    while True:
        if _answers(opener, url):
            return
        now = time.monotonic()
        if (code := process.poll()) is not None:
            _say_end(log)
            raise UserError(
                f"{module}: ended with code {code} before it was ready: {_reason(log)}; see {log}"
            )
        if now - begun > patience:
            _say_end(log)
            raise UserError(f"{module}: not ready after {patience:g} s: {_reason(log)}; see {log}")
        if now - announced > 30:
            say(f"waiting for {module}: {now - begun:.0f} s")
            announced = now
        time.sleep(POLL)


def _answers(opener: OpenerDirector, url: str) -> bool:
    """Whether a server is ready."""
    try:
        within(10.0, lambda: opener.open(f"{url}/health", timeout=10).close())
    except HTTPError as error:  # llama.cpp's 503 while it loads
        error.close()
        return False
    except (OSError, http.client.HTTPException):
        return False
    return True


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]


def _say_end(log: Path) -> None:
    """Print the last lines of a log; the error that follows has its first error."""
    last = [f"  {line[:SHOWN]}" for line in _lines(log)[-LAST:]]
    say("\n".join([f"the last lines of {log}:", *last]))


def _reason(log: Path) -> str:
    """First line of a log that looks like an error; otherwise its last line."""
    lines = _lines(log)
    lines = [line for line in lines if " WARNING " not in line] or lines  # warnings may mention errors
    named = [line for line in lines if any(mark in line for mark in WRONG)]
    # The outermost process reports its child's failure last; the first error is the cause.
    return ([*named[:1], *lines[-1:]] or ["no output"])[0][-400:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: first by SIGTERM, then by force."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin
    process.stdin.close()
    process.wait()

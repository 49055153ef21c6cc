"""Start a server in another interpreter, and end it with this process.

An engine has dependencies of its own (vLLM 0.32 needs an older transformers than ours), so it runs in an
environment of its own and is spoken to over loopback.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from decode.errors import UserError
from distill.engines.http import within
from distill.utils.progress import say
from distill.utils.thread_waiting import chosen_here

# Runs in the engine's interpreter: the server as `python -m`, and its whole process group ended when our end
# of the pipe closes, which the kernel does however this process ends.
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
POLL, GRACE = 0.25, 20.0  # seconds between looks at a starting server; for an orderly end
ENDING = 5.0  # seconds in which a server that answers no more has ended, if it is going to
WRONG = ("Error:", "error:", "Exception:")  # marks of the line of a log that says what is wrong
OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")  # variables of this interpreter
# Of vLLM. The last two are read only by builds for a CPU: GiB of its cache, which else takes nearly all
# memory and is refused where others use some, and no cores taken from other processes.
VLLM_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
NO_PROXY = ProxyHandler({})  # loopback is never asked for through a proxy


def interpreter(python: str, module: str, option: str) -> Path:
    """An interpreter that can find a module.

    Args:
        python: its path.
        module: top-level name; it is looked for, not imported, which may take a minute.
        option: that names the interpreter, for messages.

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


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is this interpreter's own, and with more variables that are not set."""
    ours = {*OURS, *chosen_here()}
    return {**more, **{name: value for name, value in os.environ.items() if name not in ours}}


@contextmanager
def serve(
    python: Path,
    module: str,
    arguments: Sequence[str],
    log: Path,
    *,
    patience: float,
    variables: Mapping[str, str],
) -> Iterator[str]:
    """A running server's url.

    Args:
        python: interpreter that has the module.
        module: run as `python -m`; it takes `--host` and `--port`, and answers /health once it is ready.
        arguments: of the module.
        log: file for its output, overwritten.
        patience: seconds until it has to be ready.
        variables: of its environment, unless they are set.

    Raises:
        UserError: it ended, or was not ready in time; the message has the log's first error. Likewise for an
            error of the block that uses it, if it has ended.
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
            yield url
        except UserError as error:
            with suppress(subprocess.TimeoutExpired):  # it may be about to end
                process.wait(ENDING)
                told = f"{module}: ended while it answered: {_reason(log)}; see {log}"
                raise UserError(told) from error
            raise
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, patience: float, module: str) -> None:
    """Until the server is ready."""
    opener, begun = build_opener(NO_PROXY), time.monotonic()
    said = begun
    while True:
        with suppress(URLError, HTTPError, OSError, http.client.HTTPException):
            within(10.0, lambda: opener.open(f"{url}/health", timeout=10).close())
            return
        now = time.monotonic()
        if (code := process.poll()) is not None:
            raise UserError(
                f"{module}: ended with code {code} before it was ready: {_reason(log)}; see {log}"
            )
        if now - begun > patience:
            raise UserError(f"{module}: not ready after {patience:g} s; its output is in {log}")
        if now - said > 30:
            say(f"waiting for {module}: {now - begun:.0f} s")
            said = now
        time.sleep(POLL)


def _reason(log: Path) -> str:
    """The first line of a log that looks like an error; else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if " WARNING " not in line] or lines  # some of them speak of errors
    named = [line for line in lines if any(mark in line for mark in WRONG)]
    # The outermost process reports last that another failed; the first error is the cause.
    return ([*named[:1], *lines[-1:]] or ["no output"])[0][-400:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: in order first, then by force."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin
    process.stdin.close()
    process.wait()

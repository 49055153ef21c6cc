"""A server in another interpreter is awaited, its error is told, and it ends with this process."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from decode.errors import UserError
from distill.engines.launch import Installation, interpreter, serve

MODULE = """
import argparse, http.server, os, subprocess, sys
a = argparse.ArgumentParser()
a.add_argument("--host"), a.add_argument("--port", type=int)
a.add_argument("--fail"), a.add_argument("--log"), a.add_argument("--hang", action="store_true")
a = a.parse_args()
if a.fail:
    print("x WARNING of `OSError: too many files`"); print("ValueError: " + a.fail)
    print("another process failed"); sys.exit(3)
if a.log:
    print(a.log); sys.exit("failed to init")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print("IndexError: out of range", flush=True); os._exit(1)
        self.send_response(503 if a.hang else 200); self.end_headers()
        told = [os.getpid(), child.pid, os.environ.get("OPTION"), "PYTHONHOME" in os.environ]
        self.wfile.write(" ".join(map(str, told)).encode())
http.server.HTTPServer((a.host, a.port), Page).serve_forever()
"""


class Engine(Installation):
    package = "json"


def test_installation_without_a_client_for_its_server_is_refused(monkeypatch):
    assert Engine(sys.executable).python
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install 'foredraft\[serving\]'"):
        Engine(sys.executable)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "engine_for_test.py").write_text(MODULE)

    def start(*arguments: str, patience: float = 30.0, **more: str):
        variables = {"PYTHONPATH": str(tmp_path), **more}
        log = tmp_path / "logs" / "engine.log"
        python = Path(sys.executable)
        return serve(python, "engine_for_test", arguments, log, patience=patience, variables=variables)

    return start


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(*pids: int) -> bool:
    for _ in range(100):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.1)
    return False


def test_serves_and_ends_with_its_children(start, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # ours: the other interpreter could not start with it
    with start(OPTION="given") as running:
        server, child, option, home = urlopen(f"{running.url}/health").read().decode().split()
        assert (option, home) == ("given", "False")
    assert gone(int(server), int(child))


def test_server_that_does_not_start_is_refused(start, capsys):
    with pytest.raises(UserError, match=r"code 3 before it was ready: ValueError: no such model; see .*log"):
        start("--fail", "no such model").__enter__()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  ValueError: no such model",
        "  another process failed",
    ]
    with pytest.raises(UserError, match="not ready after 1 s: "):
        start("--hang", patience=1.0).__enter__()


def fail(server, page: str) -> None:
    with server as running:
        with suppress(OSError):
            urlopen(f"{running.url}/{page}")
        raise UserError("nobody answers")


def test_error_of_a_server_that_ended_is_told(start, monkeypatch):
    with pytest.raises(UserError, match=r"ended while it answered: IndexError: out of range; see .*log"):
        fail(start(), "end")
    monkeypatch.setattr("distill.engines.launch.ENDING", 0.1)
    with pytest.raises(UserError, match=r"^nobody answers$"):
        fail(start(), "health")


def test_killed_process_takes_its_server_along(start, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from distill.engines.launch import serve\n"
        "with serve(Path(sys.executable), 'engine_for_test', [], Path('e.log'), patience=30, "
        f"variables={{'PYTHONPATH': {str(tmp_path)!r}}}) as running:\n"
        "  print(running.url, flush=True); time.sleep(600)"
    )
    start("--fail", "")  # only writes the module
    ours = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert ours.stdout
    server, child, *_ = urlopen(f"{ours.stdout.readline().strip()}/health").read().decode().split()
    os.kill(ours.pid, signal.SIGKILL)
    ours.wait()
    assert gone(int(server), int(child))


def test_interpreter_without_the_engine_is_refused(monkeypatch, tmp_path):
    """It does not see our packages."""
    (tmp_path / "an_engine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for python, said in (("/nowhere/bin/python", "no interpreter"), (sys.executable, "no package an_engine")):
        with pytest.raises(UserError, match=f"score.engine_python=.*{said}"):
            interpreter(python, "an_engine", "score.engine_python")


def test_first_error_of_llama_cpp_is_told(start):
    with pytest.raises(UserError, match=r"ready: .* E load: error loading model: no such model; see"):
        start("--log", "0.01 E load: error loading model: no such model").__enter__()

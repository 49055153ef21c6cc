"""A W&B server on the loopback, as far as a run needs one: what is uploaded is kept in lists."""

from __future__ import annotations

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef" * 3


class FakeWandb:
    """Answers in a thread of its own.

    Attributes:
        url: where it is.
        asked: names of all operations.
        history: rows of all runs.
        artifacts: as they were asked for; the server has them already, so that no file is sent.
        run: the newest.
        broken: it answers everything with 500.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.artifacts: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        self.broken = False
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if fake.broken:
                    self.send_error(500)
                    return
                self.give(fake.answer(self.path, body))

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.give({})

            def do_GET(self) -> None:
                self.give({})

            def give(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.socket.close()  # `server_close` would wait for clients that have nothing to ask

    def answer(self, path: str, body: bytes) -> Any:
        if not body or not re.search(r"/graphql$|/file_stream$", path):
            return {}
        asked = json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        if path.endswith("/file_stream"):
            part = asked.get("files", {}).get("wandb-history.jsonl", {"content": [], "offset": 0})
            with self._lock:  # what a client sends again, since it has not heard of it, is in its place
                self.history[part["offset"] :] = [json.loads(line) for line in part["content"]]
            return {"exitcode": None, "limits": {}}
        (name,) = re.findall(r"(?:query|mutation)\s+(\w+)", asked["query"])[:1] or ["?"]
        self.asked.append(name)
        variables = asked.get("variables") or {}
        if hasattr(self, f"_{name}"):
            return {"data": getattr(self, f"_{name}")(variables)}
        return {"data": {}}

    def _Viewer(self, variables: dict[str, Any]) -> Any:
        who = {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}"}
        return {"viewer": who | {"teams": {"edges": []}}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> Any:
        if not self.run:
            return {"model": None}
        lines = len(self.history)
        tail = json.dumps([json.dumps(self.history[-1])] if self.history else [])
        bucket = self.run | {"historyLineCount": lines, "eventsLineCount": 0, "logLineCount": 0, "tags": []}
        bucket |= {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": "{}", "notes": ""}
        return {"model": {**self.run["project"], "bucket": bucket | {"wandbConfig": '{"t": 1}'}}}

    def _UpsertBucket(self, variables: dict[str, Any]) -> Any:
        new, project = not self.run, {"id": "p", "name": "foredraft", "entity": {"id": "e", "name": "me"}}
        given = {k: v for k, v in variables.items() if v is not None}
        self.run |= {"id": "r", "description": "", "sweepName": None} | given | {"project": project}
        return {
            "upsertBucket": {"bucket": self.run | {"historyLineCount": len(self.history)}, "inserted": new}
        }

    def _CreateRunFiles(self, variables: dict[str, Any]) -> Any:
        files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}

    def _OrganizationCoreWeaveOrganizationID(self, variables: dict[str, Any]) -> Any:
        return {"entity": {"organization": None}}

    def _ArtifactType(self, variables: dict[str, Any]) -> Any:
        return {"project": {"artifact": None}}

    def _ServerFeaturesQuery(self, variables: dict[str, Any]) -> Any:
        return {"serverInfo": {"features": []}}

    def _CreateArtifact(self, variables: dict[str, Any]) -> Any:
        with self._lock:
            if variables["input"] not in self.artifacts:
                self.artifacts.append(variables["input"])
            made = {"id": f"a{1 + self.artifacts.index(variables['input'])}", "state": "COMMITTED"}
        return {"createArtifact": {"artifact": made | {"artifactSequence": {"latestArtifact": None}}}}

"""A Hugging Face Hub on this machine: as much of it as fetching and uploading a folder asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = r"(?P<repo>[^/]+/[^/]+)"


@dataclass
class Repo:
    """What a repository holds, and every commit's files before."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


class FakeHub(ThreadingHTTPServer):
    """Answers in a thread of its own.

    Attributes:
        repos: by id.
        token: that may read and write everything; others are unknown, and see what is public.
        asked: (method, path) of every request.
        cut: of a path: its requests are cut off in the middle of their bodies.
        failing: of a path -> the status that it answers.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.token = "hf_thisIsNobodysRealToken"
        self.asked: list[tuple[str, str]] = []
        self.cut, self.failing = "", {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def give(self, repo: str, files: dict[str, bytes], private: bool = False) -> None:
        """A repository that is there already."""
        self.repos[repo] = Repo(private, dict(files), 1)

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(
            {f"/api/models/{REPO}(/revision/[^/]+)?": self.info, f"/api/models/{REPO}/tree/.*": self.tree}
        )

    def do_POST(self) -> None:
        routes = {
            "/api/repos/create": self.create,
            "/api/validate-yaml": lambda: self.send({"errors": [], "warnings": []}),
            f"/api/models/{REPO}/preupload/.*": self.preupload,
            rf"/{REPO}\.git/info/lfs/objects/batch": self.batch,
            f"/api/models/{REPO}/commit/.*": self.commit,
        }
        self.answer(routes)

    def do_PUT(self) -> None:
        self.answer({"/lfs/.*": self.blob})

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, routes: dict[str, Any]) -> None:
        self.where = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, self.where))
        if self.server.cut and self.server.cut in self.where:
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            self.close_connection = True
            self.connection.close()
            return None
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for part, status in self.server.failing.items():
            if part in self.where:
                return self.send({"error": "as the test has it"}, status)
        known = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        if not known and self.command in ("POST", "PUT") and "lfs/" not in self.where:
            return self.send({"error": "Invalid username or password."}, 401)
        routes = {**routes, f"/{REPO}/resolve/[^/]+/(?P<name>.+)": self.file}
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, self.where):
                parts = found.groupdict()
                self.repo = self.server.repos.get(parts.get("repo", ""), Repo())
                hidden = self.repo.private and not known
                if "repo" in parts and (hidden or parts["repo"] not in self.server.repos):
                    return self.send({"error": "Repository not found"}, 404 if known else 401, "RepoNotFound")
                self.parts = parts
                return route()
        return self.send({"error": "no such page"}, 404)

    # -- pages -----------------------------------------------------------------------------------

    def info(self) -> None:
        listing = [{"rfilename": name} for name in self.repo.files]
        self.send({"id": self.parts["repo"], "sha": self.repo.sha, "siblings": listing})

    def tree(self) -> None:
        self.send(
            [{"type": "file", "path": n, "size": len(b), "oid": _oid(b)} for n, b in self.repo.files.items()]
        )

    def file(self) -> None:
        body = self.repo.files.get(self.parts["name"])
        if body is None:
            return self.send({}, 404, "EntryNotFound")
        return self.send(body)

    def create(self) -> None:
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name'].split('/')[-1]}"
        code = 409 if name in self.server.repos else 200
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))  # by its version
        self.server.repos.setdefault(name, Repo(private))
        self.send({"url": f"{self.server.url}/{name}", "name": name, "id": name}, code)

    def preupload(self) -> None:
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
            for f in json.loads(self.body)["files"]
        ]
        self.send({"files": [mode | {"shouldIgnore": False} for mode in modes]})

    def batch(self) -> None:
        objects = json.loads(self.body)["objects"]
        for one in objects:
            if one["oid"] not in self.server.blobs:
                one["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}
        self.send({"transfer": "basic", "objects": objects})

    def blob(self) -> None:
        oid = self.where.rpartition("/")[2]
        whole = hashlib.sha256(self.body).hexdigest() == oid
        if whole:
            self.server.blobs[oid] = self.body
        self.send({}, 200 if whole else 400)

    def commit(self) -> None:
        files = dict(self.repo.files)
        for line in self.body.splitlines():
            kind, value = (json.loads(line)[key] for key in ("key", "value"))
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif kind == "deletedFile":
                files.pop(value["path"])
        self.repo.files, self.repo.commits = files, self.repo.commits + 1
        where = f"{self.server.url}/{self.parts['repo']}/commit/{self.repo.sha}"
        self.send({"success": True, "commitUrl": where, "commitOid": self.repo.sha, "pullRequestUrl": None})

    def send(self, value: Any, code: int = 200, error: str = "") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if hasattr(self, "repo"):
            self.send_header("X-Repo-Commit", self.repo.sha)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()

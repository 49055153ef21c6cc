"""An OpenAI-compatible server in a thread of the test, with faults to order."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPENAI = {"model", "messages", "prompt", "temperature", "top_p", "max_tokens", "seed", "tools"}
Fault = tuple[int, dict[str, str], str]  # status, headers, body
CUT: Fault = (-1, {}, "")  # half a body, and the connection is gone
DRIP: Fault = (-2, {}, "")  # a byte every tenth of a second, for ever


class FakeServer:
    """Answers `say(the last message)`, or whatever `message` makes of a request.

    Args:
        chat: renders prompts, where ids are asked for.
        port: 0 for any.
        models: that it lists and has.
        key: that it wants.
        strict: refuses fields beyond OpenAI's own, as `transformers serve` does.
        ids: returns token ids when asked, as vLLM does.
        delay: seconds an answer takes.
    """

    def __init__(self, chat: Any, port=0, models=("m",), key=None, strict=False, ids=True, delay=0.0) -> None:
        self.chat, self.models, self.key = chat, models, key
        self.strict, self.ids, self.delay = strict, ids, delay
        self.asked: list[dict[str, Any]] = []  # bodies, and when; probes (one token) aside
        self.faults: list[Fault] = []  # for the requests to come, one each
        self.message: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {}
        self.prompt: Callable[[list[int]], list[int]] = lambda ids: ids
        self.pages: dict[str, Callable[[], tuple[int, str]]] = {}  # path -> status and text of other pages
        self.moved = ""  # where it sends every request on to, this server's paths behind it
        self.coding = ""  # that it names for the bodies of its answers
        self.keys: list[str] = []  # that it was shown
        self.now = self.most = 0
        self.lock, self.open = threading.Lock(), set[socket.socket]()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def kill(self) -> None:
        """Cut every connection and leave the port."""
        self.http.shutdown()
        self.http.server_close()
        with self.lock:
            for connection in self.open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def fault(self, count: int, status: int, body: str = "", **headers: str) -> None:
        """Let the next `count` requests fail."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults += [(status, named, body)] * count

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """A completion, of as many tokens as are asked for at most."""
        prompt = body.get("prompt")
        last = body["messages"][-1]["content"] if prompt is None else str(prompt)
        choice: dict[str, Any] = {"finish_reason": "stop", **self.message(body)}
        text = choice.pop("content", f"so: {last}")
        encode = self.chat.tokenizer.encode
        end = self.chat.tokenizer.eos_token_id
        tokens = choice.pop("tokens", [*encode(text or "", add_special_tokens=False), end])
        if len(tokens) > body["max_tokens"]:
            tokens, choice["finish_reason"] = tokens[: body["max_tokens"]], "length"
            text = self.chat.tokenizer.decode(tokens)
        read = self.chat.encode(body["messages"]) if prompt is None else encode(str(prompt))
        if isinstance(prompt, list):
            read = prompt
        read = self.prompt(read)
        said: dict[str, Any] = {"object": "x", "usage": {"prompt_tokens": len(read)}}
        if self.ids and body.get("return_token_ids"):
            choice["token_ids"], said["prompt_token_ids"] = tokens, read
        if prompt is None:
            choice["message"] = {"role": "assistant", "content": text, **choice.pop("apart", {})}
        else:
            choice["text"] = text
        return said | {"choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        with self.fake.lock:
            self.fake.open.add(self.connection)

    def finish(self) -> None:
        with self.fake.lock:
            self.fake.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client may leave, and `kill` cuts
            super().handle()

    def do_GET(self) -> None:
        if self._wrong_key():
            return
        if page := self.fake.pages.get(self.path):
            status, text = page()
            self._head(status, {"content-type": "text/plain"}, len(text.encode()))
            self.wfile.write(text.encode())
            return
        listed = [{"id": name, "object": "model", "max_model_len": 256} for name in self.fake.models]
        self._send(200, {"object": "list", "data": listed})

    def do_POST(self) -> None:
        fake, body = self.fake, json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._wrong_key() or self._wrong(body):
            return
        with fake.lock:
            probe = body["max_tokens"] == 1
            if not probe:
                fake.asked.append(body | {"at": time.monotonic()})
            fake.now += 1
            fake.most = max(fake.most, fake.now)
            fault = None if probe or not fake.faults else fake.faults.pop(0)
        try:
            time.sleep(0 if probe else fake.delay)
            said = fake.reply(body)
        finally:
            with fake.lock:
                fake.now -= 1
        if fault is None:
            self._send(200, said)
        elif fault is DRIP:
            self._head(200, {}, 10**6)
            while True:  # until the client leaves
                self.wfile.write(b" ")
                time.sleep(0.1)
        elif fault is CUT:
            whole = json.dumps(said).encode()
            self._head(200, {}, len(whole))
            self.wfile.write(whole[: len(whole) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self._head(fault[0], fault[1], len(fault[2].encode()))
            self.wfile.write(fault[2].encode())

    def _wrong_key(self) -> bool:
        """Whether the request is answered already: sent on, or refused."""
        given = (self.headers["authorization"] or "").removeprefix("Bearer ")
        if given:
            self.fake.keys.append(given)
        if self.fake.moved and self.path not in self.fake.pages:
            self._head(307, {"location": self.fake.moved + self.path}, 0)
            return True
        if self.fake.key in (None, given):
            return False
        self._send(401, {"error": {"message": f"Incorrect API key provided: {given}"}})
        return True

    def _wrong(self, body: dict[str, Any]) -> bool:
        if body["model"] not in self.fake.models:
            self._send(404, {"error": {"message": f"The model {body['model']} does not exist."}})
            return True
        if self.fake.strict and (more := sorted(set(body) - OPENAI)):
            self._send(422, {"detail": f"Unexpected fields in the request: {more}"})
            return True
        return False

    def _send(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self._head(status, {}, len(text))
        self.wfile.write(text)

    def _head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in ({"content-type": "application/json"} | headers).items():
            self.send_header(name, value)
        if self.fake.coding:
            self.send_header("content-encoding", self.fake.coding)
        self.send_header("content-length", str(length))
        self.end_headers()

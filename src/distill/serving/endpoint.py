"""HTTP client of a running engine: its metrics and its list of models."""

from __future__ import annotations

import http.client
import json
import os
import time
from functools import partial
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from typing_extensions import override

from decode.errors import UserError
from distill.engines.http import MAX_BYTES, check_redirect, within
from distill.serving import metrics
from distill.serving.metrics import Reading

CHUNK = 1 << 16


class Model(NamedTuple):
    """A model that a server lists.

    Attributes:
        id: name on the server.
        root: path or hub id that it was loaded from; empty if unknown.
    """

    id: str
    root: str


class _SameOrigin(HTTPRedirectHandler):
    """Follows redirects within the server only: `urlopen` would send the API key to other hosts."""

    @override
    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        check_redirect(req.full_url, newurl, "url")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Endpoint:
    """HTTP endpoint of an engine.

    Args:
        url: address of the server with its port; a trailing /v1 or /metrics is removed.
        timeout: seconds for a page.
        api_key_env: name of the environment variable with the API key.
    """

    def __init__(self, url: str, timeout: float, api_key_env: str) -> None:
        self.url = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
        self.timeout, self.key_env = timeout, api_key_env

    def reading(self, model: str | None = None) -> Reading:
        """Read the current counters.

        Raises:
            UserError: no server, no metrics, or metrics of an unknown engine.
        """
        return metrics.read(self._page("/metrics"), f"{self.url}/metrics", model)

    def version(self) -> str:
        """Version of the engine, from vLLM's /version page; empty if there is none.

        Raises:
            UserError: no server.
        """
        try:
            return str(json.loads(self._page("/version"))["version"])
        except (KeyError, RecursionError, TypeError, ValueError):
            return ""

    def models(self) -> list[Model]:
        """Models and adapters that the server lists; empty if it has no list.

        Raises:
            UserError: no server.
        """
        try:
            listed: Any = json.loads(self._page("/v1/models"))
            return [Model(str(m["id"]), str(m.get("root") or "")) for m in listed["data"]]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return []

    def _page(self, path: str) -> str:
        where, key = self.url + path, os.environ.get(self.key_env, "")
        request = Request(where, headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            body = within(self.timeout, partial(self._read, request))
        except HTTPError as error:
            raise UserError(self._status_message(where, error.code)) from None
        except TimeoutError:
            raise UserError(f"{where}: no answer within timeout={self.timeout:g} s") from None
        except (URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise UserError(f"{where}: no answer within timeout={self.timeout:g} s") from None
            raise UserError(f"{where}: no server answers ({reason})") from None
        return body.decode("utf-8", "replace")

    def _read(self, request: Request) -> bytes:
        until = time.monotonic() + self.timeout
        body = bytearray()
        with build_opener(_SameOrigin).open(request, timeout=self.timeout) as response:
            while chunk := response.read1(CHUNK):
                body += chunk
                if len(body) > MAX_BYTES:
                    size = MAX_BYTES >> 20
                    raise UserError(f"{request.full_url}: more than {size} MB; not an engine's page")
                if time.monotonic() > until:
                    raise TimeoutError
        return bytes(body)

    def _status_message(self, where: str, status: int) -> str:
        if status in (401, 403):
            return f"{where}: rejects the key in api_key_env={self.key_env} ({status})"
        switch = "; SGLang has this page only with --enable-metrics" if where.endswith("/metrics") else ""
        return f"{where}: answers with {status}{switch}; is url=http://host:port an engine's?"

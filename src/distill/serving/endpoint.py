"""A running engine's pages: its metrics, and the models that it serves."""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from typing_extensions import override

from decode.errors import UserError
from distill.engines.http import check_redirect
from distill.serving import metrics as counters
from distill.serving.metrics import Reading

LARGEST = 32 << 20  # bytes of a page; an engine's metrics are a few hundred kilobytes
CHUNK = 1 << 16


class Model(NamedTuple):
    """One that a server lists.

    Attributes:
        id: its name there.
        root: path or hub id that it was loaded from, where the server says so.
    """

    id: str
    root: str


class _SameOrigin(HTTPRedirectHandler):
    """Follows redirects that stay on the server: `urlopen` would show its key to any other."""

    @override
    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        check_redirect(req.full_url, newurl, "url")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Endpoint:
    """Where an engine answers.

    Args:
        url: of the server, up to its port; a /v1 or /metrics behind it is left out.
        timeout: seconds for a page.
        api_key_env: name of the environment variable with the key, if it wants one.
    """

    def __init__(self, url: str, timeout: float, api_key_env: str) -> None:
        self.url = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
        self.timeout, self.key_env = timeout, api_key_env

    def reading(self, model: str | None = None) -> Reading:
        """The counters as they are now.

        Raises:
            UserError: nobody there, no metrics, or none of an engine that is known.
        """
        return counters.read(self._page("/metrics"), f"{self.url}/metrics", model)

    def models(self) -> list[Model]:
        """What it serves, adapters included; empty where it does not say.

        Raises:
            UserError: nobody there.
        """
        try:
            listed: Any = json.loads(self._page("/v1/models"))
            return [Model(str(m["id"]), str(m.get("root") or "")) for m in listed["data"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            return []

    def _page(self, path: str) -> str:
        where, key = self.url + path, os.environ.get(self.key_env, "")
        request = Request(where, headers={"Authorization": f"Bearer {key}"} if key else {})
        until = time.monotonic() + self.timeout
        found = bytearray()
        try:
            with build_opener(_SameOrigin).open(request, timeout=self.timeout) as response:
                while chunk := response.read1(CHUNK):
                    found += chunk
                    if len(found) > LARGEST:
                        raise UserError(
                            f"{where}: more than {LARGEST >> 20} MB; that is no page of an engine"
                        )
                    if time.monotonic() > until:
                        raise TimeoutError
        except HTTPError as error:
            raise UserError(self._refused(where, error.code)) from None
        except TimeoutError:
            raise UserError(f"{where}: no answer within timeout={self.timeout:g} s") from None
        except (URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise UserError(f"{where}: no answer within timeout={self.timeout:g} s") from None
            raise UserError(f"{where}: nobody answers there ({reason})") from None
        return found.decode("utf-8", "replace")

    def _refused(self, where: str, status: int) -> str:
        if status in (401, 403):
            return f"{where}: wants another key than api_key_env={self.key_env} has ({status})"
        switch = "; SGLang has this page with --enable-metrics alone" if where.endswith("/metrics") else ""
        return f"{where}: answers with {status}{switch}; is url=http://host:port an engine's?"

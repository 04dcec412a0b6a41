"""Requests and responses, the same for WSGI and ASGI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

#: the longest body of a request in bytes: a form has one or two names of 255 characters
LONGEST_BODY = 64 * 1024


@dataclass(frozen=True)
class Request:
    """A request, as ``view`` and ``authorize`` get it.

    >>> def staff(request: dashboard.Request) -> bool:
    ...     return request.headers.get("x-forwarded-user") in ("alice", "bob")
    >>> app.mount("/locks", dashboard.asgi(locks, view=staff))
    """

    method: str
    #: the path below the mount: ``/``, ``/live``, ``/release``
    path: str
    #: where the page is mounted: ``/locks``, or empty
    root: str
    #: ``http`` or ``https``
    scheme: str
    #: by name in lower case
    headers: Mapping[str, str]
    query_string: str = ""
    body: bytes = b""
    #: of WSGI, the server's ``environ``: ``app.request_context(request.environ)`` is Flask's
    environ: Mapping[str, Any] | None = None
    #: of ASGI, the server's ``scope``: ``starlette.requests.Request(request.scope)``
    scope: Mapping[str, Any] | None = None

    @property
    def host(self) -> str:
        """The host as the client sent it, with its port."""
        return self.headers.get("host", "")

    @cached_property
    def cookies(self) -> dict[str, str]:
        """The cookies; empty when they can't be parsed."""
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(self.headers.get("cookie", ""))
        except CookieError:
            return {}
        return {name: morsel.value for name, morsel in jar.items()}

    @cached_property
    def query(self) -> dict[str, str]:
        """The query parameters."""
        return _pairs(self.query_string)

    @cached_property
    def form(self) -> dict[str, str]:
        """The fields of a submitted form."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/x-www-form-urlencoded":
            return {}
        return _pairs(self.body.decode("ascii", "replace"))


def _pairs(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        return {}


@dataclass(frozen=True)
class Response:
    """A response."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = field(default=())

"""What is asked and what is answered, whichever door it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

#: a form of the page has a name or two of 255 characters in it
LONGEST_BODY = 64 * 1024


@dataclass(frozen=True)
class Request:
    """A request, as ``view`` and ``authorize`` are asked about it.

    >>> def staff(request: dashboard.Request) -> bool:
    ...     return request.headers.get("x-forwarded-user") in ("alice", "bob")
    >>> app.mount("/locks", dashboard.asgi(locks, view=staff))
    """

    method: str
    #: below the mount: ``/``, ``/live``, ``/release``
    path: str
    #: where the page is mounted: ``/locks``, or nothing
    root: str
    #: ``http`` or ``https``
    scheme: str
    #: with names in lower case
    headers: Mapping[str, str]
    query_string: str = ""
    body: bytes = b""
    #: through the WSGI door, the server's ``environ``: ``app.request_context(request.environ)`` is Flask's
    environ: Mapping[str, Any] | None = None
    #: through the ASGI door, the server's ``scope``: ``starlette.requests.Request(request.scope)``
    scope: Mapping[str, Any] | None = None

    @property
    def host(self) -> str:
        """As the client named it, with its port."""
        return self.headers.get("host", "")

    @cached_property
    def cookies(self) -> dict[str, str]:
        """What the client keeps for this host; nothing where it can't be read."""
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(self.headers.get("cookie", ""))
        except CookieError:
            return {}
        return {name: morsel.value for name, morsel in jar.items()}

    @cached_property
    def query(self) -> dict[str, str]:
        """What follows the question mark."""
        return _pairs(self.query_string)

    @cached_property
    def form(self) -> dict[str, str]:
        """What was sent, when it was a form."""
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
    """An answer."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = field(default=())

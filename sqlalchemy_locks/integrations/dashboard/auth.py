"""Access control: ``view`` and ``authorize``, and protection against cross-site requests.

An action needs three things that another site doesn't have: a header of the browser (``Sec-Fetch-Site`` or ``Origin``)
that says that the page itself sent it; a cookie of this page; and a token made of that cookie, the visitor's name, and
a secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy_locks._validation import MAX_NAME_LENGTH
from sqlalchemy_locks.integrations.dashboard.http import Request

Callback = Callable[[Request], Any]
#: returns a callback's result, awaited if it is awaitable, or refuses to
Await = Callable[[Any], Any]

COOKIE = "sqlalchemy_locks_page"
#: how long a message of a redirection is valid, in seconds
_MESSAGE_AGE = 60
_UNNAMED = "a visitor without a name"


class PageGuard:
    """The callbacks of one page, its secret, and the host names that it is served under."""

    def __init__(
        self,
        view: Callback | None,
        authorize: Callback | None,
        secret: str | bytes | None,
        hosts: Collection[str] | None = None,
    ) -> None:
        if isinstance(hosts, str):
            raise TypeError(f"hosts= is a list of host names, not the string {hosts!r}")
        if authorize is not None and not secret:
            raise ValueError(
                "authorize= needs secret=, the same in every process that serves the page, e.g. your app's secret key: "
                "with random secrets a worker would refuse the forms of another"
            )
        key = secrets.token_bytes(32) if not secret else secret.encode() if isinstance(secret, str) else secret
        self._key = hashlib.sha256(b"sqlalchemy_locks.integrations.dashboard\0" + key).digest()
        self._view, self._authorize = view, authorize
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    def knows_host(self, request: Request) -> bool:
        """Return whether the page is served under the request's host name."""
        if self._hosts is None:
            return True
        host = request.host.lower()
        name, _, port = host.rpartition(":")
        return host in self._hosts or (port.isdigit() and name in self._hosts)

    def may_view(self, request: Request, wait: Await) -> bool:
        """Return whether the visitor may see the page."""
        return self._view is None or _answer(wait(self._view(request)), "view") is not False

    def who(self, request: Request, wait: Await) -> str | None:
        """Return the name of a visitor who may act, or ``None``."""
        if self._authorize is None:
            return None
        answer = _answer(wait(self._authorize(request)), "authorize")
        if answer is False:
            return None
        return _UNNAMED if answer is True else answer

    @property
    def acts(self) -> bool:
        """Whether the page has actions."""
        return self._authorize is not None

    def token(self, visitor: str, who: str) -> str:
        """Return the token of a form."""
        return self._signature("token", visitor, who)

    def refusal(self, request: Request, who: str) -> str | None:
        """Return why an action was not sent by this page, or ``None`` if it was."""
        if not _sent_by_this_page(request):
            return "the request was not sent by the page itself"
        visitor = request.cookies.get(COOKIE, "")
        if not visitor:
            return "the page's cookie is missing: allow it in your browser"
        if not hmac.compare_digest(self.token(visitor, who).encode(), request.form.get("token", "").encode()):
            return "the form is out of date, or of another visitor: reload the page and try again"
        return None

    def seal(self, message: str) -> str:
        """Return a message signed for the URL of a redirection."""
        text = base64.urlsafe_b64encode(f"{int(time.time())} {message}".encode()).decode()
        return f"{text}.{self._signature('said', text)}"

    def unseal(self, sealed: str) -> str | None:
        """Return the message, or ``None`` when its signature is wrong or it is too old."""
        text, _, signature = sealed.rpartition(".")
        if not hmac.compare_digest(self._signature("said", text).encode(), signature.encode()):
            return None
        at, _, message = base64.urlsafe_b64decode(text).decode().partition(" ")
        return message if 0 <= time.time() - int(at) <= _MESSAGE_AGE else None

    def _signature(self, *parts: str) -> str:
        signed = b"\0".join(part.encode("utf-8", "surrogatepass") for part in parts)
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def visitor_of(request: Request) -> tuple[str, bool]:
    """Return the visitor's random id, and whether it is new."""
    known = request.cookies.get(COOKIE, "")
    return (known, False) if known else (secrets.token_urlsafe(24), True)


def cookie(request: Request, visitor: str) -> str:
    """Return the header that stores it; without a path it is sent to the page's own URLs only."""
    secure = "; Secure" if request.scheme == "https" else ""
    return f"{COOKIE}={visitor}; HttpOnly; SameSite=Strict{secure}"


def refuse_awaitable(answer: Any) -> Any:
    """Return a plain result; WSGI can't await a coroutine, which would count as true."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError("view= and authorize= are plain functions for wsgi(): only asgi() awaits coroutine functions")
    return answer


def _answer(answer: Any, what: str) -> bool | str:
    if isinstance(answer, str):
        # in the form in which it can be stored and logged
        return answer.replace("\0", "").strip()[:MAX_NAME_LENGTH].strip() or False
    if isinstance(answer, bool) or answer is None:
        return bool(answer)
    raise TypeError(f"{what}() returns True, False, or a name, not {type(answer).__name__}")


def _sent_by_this_page(request: Request) -> bool:
    """Check headers that browsers set, and that no script can change."""
    fetch_site = request.headers.get("sec-fetch-site")
    if fetch_site is not None:
        # also correct behind a proxy that changes the host
        return fetch_site == "same-origin"
    try:
        origin = urlsplit(request.headers.get("origin", "")).netloc
    except ValueError:  # not sent by a browser
        return False
    return bool(origin) and origin.lower() == request.host.lower()

"""Who may do what: ``view`` and ``authorize``, and what keeps other sites from acting in a visitor's name.

An action needs three things: a verdict of the browser, or an ``Origin``, that says the page itself sent it; a cookie
that only this page's visitor has; and a token made of that cookie, of who is acting, and of a secret. A site elsewhere
has none of them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy_locks._validation import MAX_NAME_LENGTH
from sqlalchemy_locks.integrations.dashboard.http import Request

Callback = Callable[[Request], Any]
#: has a coroutine's answer; refuses where there is nobody to await it
Settle = Callable[[Any], Any]

COOKIE = "sqlalchemy_locks_page"
#: how long a message that was sent along with a redirection is shown, in seconds
_SHOWN = 60
_NOBODY = "somebody whom authorize() gave no name"


class PageGuard:
    """The callbacks of one page, and its secret."""

    def __init__(self, view: Callback | None, authorize: Callback | None, secret: str | bytes | None) -> None:
        if authorize is not None and not secret:
            raise ValueError(
                "authorize= needs secret=, the same in every process that serves the page: your app's secret key. "
                "Without one, what one worker has shown, the next would refuse"
            )
        given = secrets.token_bytes(32) if not secret else secret.encode() if isinstance(secret, str) else secret
        self._key = hashlib.sha256(b"sqlalchemy_locks.integrations.dashboard\0" + given).digest()
        self._view, self._authorize = view, authorize

    def may_view(self, request: Request, settle: Settle) -> bool:
        """Whether the page is shown at all."""
        return self._view is None or _answer(settle(self._view(request)), "view") is not False

    def who(self, request: Request, settle: Settle) -> str | None:
        """Who may act here, by the name that ``authorize`` gave; ``None``: nobody."""
        if self._authorize is None:
            return None
        answer = _answer(settle(self._authorize(request)), "authorize")
        if answer is False:
            return None
        return _NOBODY if answer is True else answer

    @property
    def acts(self) -> bool:
        """Whether there are actions at all."""
        return self._authorize is not None

    def token(self, visitor: str, who: str) -> str:
        """What a form carries."""
        return self._signature("token", visitor, who)

    def refusal(self, request: Request, who: str) -> str | None:
        """Why an action is not this page's own, as a sentence; ``None`` when it is."""
        if not _sent_by_this_page(request):
            return "this didn't come from the page itself"
        visitor = request.cookies.get(COOKIE, "")
        if not visitor:
            return "its cookie is missing, which your browser has to keep"
        if not hmac.compare_digest(self.token(visitor, who).encode(), request.form.get("token", "").encode()):
            return "it was shown to somebody else, or too long ago: reload the page and try again"
        return None

    def seal(self, message: str) -> str:
        """A message that survives a redirection, and that nobody else can write."""
        text = base64.urlsafe_b64encode(f"{int(time.time())} {message}".encode()).decode()
        return f"{text}.{self._signature('said', text)}"

    def unseal(self, sealed: str) -> str | None:
        """The message; ``None`` when it isn't ours, or old."""
        text, _, signature = sealed.rpartition(".")
        if not hmac.compare_digest(self._signature("said", text).encode(), signature.encode()):
            return None
        at, _, message = base64.urlsafe_b64decode(text).decode().partition(" ")
        return message if 0 <= time.time() - int(at) <= _SHOWN else None

    def _signature(self, *parts: str) -> str:
        signed = b"\0".join(part.encode("utf-8", "surrogatepass") for part in parts)
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def visitor_of(request: Request) -> tuple[str, bool]:
    """The visitor's own random number, and whether it is new."""
    known = request.cookies.get(COOKIE, "")
    return (known, False) if known else (secrets.token_urlsafe(24), True)


def cookie(request: Request, visitor: str) -> str:
    """The header that keeps it, for this page alone: its path is where the page is, as the browser sees it."""
    secure = "; Secure" if request.scheme == "https" else ""
    return f"{COOKIE}={visitor}; HttpOnly; SameSite=Strict{secure}"


def settled(answer: Any) -> Any:
    """Through the WSGI door nobody awaits: a coroutine would be taken for a yes."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError("view= and authorize= are plain functions here: only the ASGI door awaits coroutine functions")
    return answer


def _answer(answer: Any, what: str) -> bool | str:
    if isinstance(answer, str):
        # as it can be stored, and logged
        return answer.replace("\0", "").strip()[:MAX_NAME_LENGTH].strip() or False
    if isinstance(answer, bool) or answer is None:
        return bool(answer)
    raise TypeError(f"{what}() gives True, False, or a name, not {type(answer).__name__}")


def _sent_by_this_page(request: Request) -> bool:
    """By what browsers say themselves, and no page can make them say."""
    verdict = request.headers.get("sec-fetch-site")
    if verdict is not None:
        # right behind proxies, too, that change the host
        return verdict == "same-origin"
    try:
        origin = urlsplit(request.headers.get("origin", "")).netloc
    except ValueError:  # one that no browser sends
        return False
    return bool(origin) and origin.lower() == request.host.lower()

"""Access control: ``view`` and ``authorize``, and protection against cross-site requests.

An action needs three things that another site doesn't have: a header of the browser (``Sec-Fetch-Site`` or ``Origin``)
that says that the page itself sent it; a cookie of this page; and a token that signs the cookie and the visitor's name.

Starlette's ``SessionMiddleware`` is not used: it would replace the session of the app that the page is mounted in.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from itsdangerous import BadData, Signer, URLSafeTimedSerializer
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from sqlalchemy_locks._validation import MAX_NAME_LENGTH

Callback = Callable[[Request], Any]

COOKIE = "sqlalchemy_locks_page"
#: how long a message of a redirection is valid, in seconds
_MESSAGE_AGE = 60
_UNNAMED = "a visitor without a name"


async def may_view(view: Callback | None, request: Request) -> bool:
    """Return whether the visitor may see the page."""
    return view is None or bool(await _answer(view, request, "view"))


async def visitor_name(authorize: Callback | None, request: Request) -> str | None:
    """Return the name of a visitor who may act, or ``None``."""
    answer = authorize is not None and await _answer(authorize, request, "authorize")
    return _UNNAMED if answer is True else answer or None


async def _answer(callback: Callback, request: Request, what: str) -> bool | str:
    # a plain function may query a database
    answer = await run_in_threadpool(callback, request)
    if inspect.isawaitable(answer):
        answer = await answer
    if isinstance(answer, str):
        # shortened, and without NUL, so that it can be stored and logged
        return answer.replace("\0", "").strip()[:MAX_NAME_LENGTH].strip() or False
    if isinstance(answer, bool) or answer is None:
        return bool(answer)
    raise TypeError(f"{what}() returns True, False, or a name, not {type(answer).__name__}")


class Signatures:
    """Signs and verifies the texts that only the page can have written: tokens of forms, messages of redirections."""

    def __init__(self, secret: str | bytes) -> None:
        salt = "sqlalchemy_locks.integrations.dashboard"
        self._forms = Signer(secret, salt=f"{salt}.form", digest_method=hashlib.sha256)
        self._messages = URLSafeTimedSerializer(secret, salt=f"{salt}.message")

    def token(self, cookie: str, who: str) -> str:
        """Return the token of a form."""
        return self._forms.get_signature(f"{cookie}\0{who}").decode()

    def refusal(self, request: Request, form: Mapping[str, str], who: str) -> str | None:
        """Return why an action was not sent by this page, or ``None`` if it was."""
        if not _sent_by_this_page(request):
            return "the request was not sent by the page itself"
        cookie = request.cookies.get(COOKIE)
        if not cookie:
            return "the page's cookie is missing: allow it in your browser"
        if not self._forms.verify_signature(f"{cookie}\0{who}", form.get("token", "")):
            return "the form is out of date, or of another visitor: reload the page and try again"
        return None

    def seal(self, message: str) -> str:
        """Return a message signed for the URL of a redirection."""
        return str(self._messages.dumps(message))

    def unseal(self, sealed: str) -> str | None:
        """Return the message, or ``None`` when its signature is wrong or it is too old."""
        try:
            return str(self._messages.loads(sealed, max_age=_MESSAGE_AGE))
        except BadData:
            return None


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
    return bool(origin) and origin.lower() == request.headers.get("host", "").lower()

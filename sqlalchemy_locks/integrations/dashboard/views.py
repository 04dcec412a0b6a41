"""The page's views: the page, its refreshed part, and its actions.

Templates run in a thread, and so do the statements of ``Locks``. Those of ``AsyncLocks`` run in the event loop, which
awaits the database.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

import python_multipart  # noqa: F401 - Starlette reads forms with it
from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import greenlet_spawn
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates
from starlette.types import Message

from sqlalchemy_locks._validation import escape_unprintable, format_duration
from sqlalchemy_locks.admin.overview import OwnTable
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard import actions, queries
from sqlalchemy_locks.integrations.dashboard.auth import COOKIE, Callback, Signatures, visitor_name

#: the page pauses this many times as long as a refresh took, so that watching it never keeps a server busy
REST = 10
#: the longest body of a request in bytes: a form has one or two names of 255 characters
LONGEST_BODY = 64 * 1024
#: how many characters of a name are shown; its title has all of them
SHORT = 48

T = TypeVar("T")


class Page:
    """The page of one application.

    :param locks: returns the ``Locks`` or ``AsyncLocks`` to show, called at each request.
    :param authorize: with ``signatures``, names the visitor who may act; without it there are no actions.
    :param own: tables of the app's own, by name.
    :param options: further values for the templates.
    """

    def __init__(
        self,
        locks: Callable[[], Any],
        authorize: Callback | None,
        signatures: Signatures,
        own: Mapping[str, OwnTable],
        options: Mapping[str, Any],
    ) -> None:
        self._locks = locks
        self._authorize = authorize
        self._signatures = signatures
        self._own = own
        environment = Environment(
            loader=PackageLoader(__package__ or ""),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(short=short, number=number, duration=format_duration, plain=plain)
        environment.globals.update(options, rest=REST, unfolded=queries.UNFOLDED)
        self._templates = Jinja2Templates(env=environment)

    async def show(self, template: str, request: Request) -> Response:
        """Answer with the page, or with the part of it that is refreshed."""
        who = await visitor_name(self._authorize, request)
        cookie = request.cookies.get(COOKIE) or secrets.token_urlsafe(24)
        of, whole = request.query_params.get("of") or None, template == "page.html"
        context = {
            "who": who,
            "token": "" if who is None else self._signatures.token(cookie, who),
            "message": self._signatures.unseal(request.query_params.get("said", "")),
        }

        def read(locks: Locks) -> dict[str, Any]:
            snapshot = queries.read_all(locks, of, self._own)
            return {"snapshot": snapshot, "facts": queries.facts(locks) if whole else None}

        try:
            context |= await _run(self._locks(), read)
        except (SQLAlchemyError, OSError, LockError) as error:
            raise HTTPException(503, f"The database can't be reached: {queries.cause(error)}") from error
        response = await self._render(request, template, context)
        if who is not None and COOKIE not in request.cookies:
            secure = request.url.scheme == "https"
            # without a path, it is sent to the page's own URLs only
            response.set_cookie(COOKIE, cookie, path=None, secure=secure, httponly=True, samesite="strict")
        return response

    async def act(self, name: str, request: Request) -> Response:
        """Execute the action of a form, and redirect to the page."""
        form = await _read_form(request)
        who = await visitor_name(self._authorize, request)
        if who is None:
            actions.log_refused(name, None, "not authorized", form)
            raise HTTPException(403, "You may see this page, but not change anything.")
        why = self._signatures.refusal(request, form, who)
        if why is not None:
            actions.log_refused(name, who, why, form)
            raise HTTPException(403, f"Nothing was done: {why}.")

        def execute(locks: Locks) -> str:
            message = actions.ACTIONS[name](locks, form, who, self._own)
            actions.log_done(name, who, message)
            locks._emit("acted", f"dashboard.{name}", [actions.subject(form)], owner=who)
            return message

        try:
            message = await _run(self._locks(), execute)
        except (LockError, ValueError, TypeError) as error:
            actions.log_refused(name, who, str(error), form)
            raise HTTPException(400, f"Nothing was done: {error}.") from error
        except (SQLAlchemyError, OSError) as error:
            actions.log_refused(name, who, str(error), form)
            raise HTTPException(503, f"It is unknown whether this was done: {queries.cause(error)}") from error
        back = {"said": self._signatures.seal(message)}
        if form.get("of"):
            back["of"] = form["of"]
        return RedirectResponse(f"./?{urlencode(back)}", 303)

    async def explain(self, request: Request, error: Exception) -> Response:
        """Answer a request that was refused or has failed."""
        assert isinstance(error, HTTPException)
        response = await self._render(request, "message.html", {"sentence": error.detail})
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    async def _render(self, request: Request, template: str, context: dict[str, Any]) -> Response:
        return await run_in_threadpool(self._templates.TemplateResponse, request, template, context)


async def _run(locks: Any, function: Callable[[Locks], T]) -> T:
    """Call a function with synchronous ``Locks``: in a thread, or in a greenlet for ``AsyncLocks``."""
    if isinstance(locks, Locks):
        return await run_in_threadpool(function, locks)
    return await greenlet_spawn(function, locks._sync)


async def _read_form(request: Request) -> dict[str, str]:
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > LONGEST_BODY:
            raise HTTPException(413, "The request is too long.")
        return message

    async with Request(request.scope, receive).form(max_files=0, max_fields=20) as form:
        return {name: value for name, value in form.items() if isinstance(value, str)}


def plain(value: Any) -> str:
    """Return a text with its control characters escaped."""
    return escape_unprintable(str(value))


def short(value: Any) -> str:
    """Return a name cut to ``SHORT`` characters, with control characters escaped."""
    text = plain(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def number(value: Any) -> str:
    """Format a number with commas."""
    return f"{int(value):,}"

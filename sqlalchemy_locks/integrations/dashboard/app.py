"""The page as an ASGI application, which is one of Starlette, and as a WSGI application."""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import a2wsgi
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.admin.overview import OwnTable
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard.actions import ACTIONS
from sqlalchemy_locks.integrations.dashboard.auth import Callback, Signatures, may_view
from sqlalchemy_locks.integrations.dashboard.views import Page
from sqlalchemy_locks.queue.queue import Queue

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlalchemy_locks.facade.async_locks import AsyncLocks

L = TypeVar("L")
WSGI = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class PageOptions(TypedDict, total=False):
    """The options of the page; see :func:`asgi`."""

    view: Callback | None
    authorize: Callback | None
    secret: str | bytes | None
    refresh: float
    title: str
    own: Mapping[str, OwnTable] | None
    hosts: Collection[str] | None


_SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # the page's own forms have to send their origin
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_log = logging.getLogger("sqlalchemy_locks")


def asgi(
    locks: AsyncLocks | Locks | Callable[[], AsyncLocks | Locks],
    *,
    view: Callback | None = None,
    authorize: Callback | None = None,
    secret: str | bytes | None = None,
    refresh: float = 5.0,
    title: str = "Locks",
    own: Mapping[str, OwnTable] | None = None,
    hosts: Collection[str] | None = None,
) -> Starlette:
    """Return the page as an ASGI application: for FastAPI, Starlette, Litestar, or any server.

    :param locks: ``AsyncLocks``, or ``Locks``, which run in a thread; or a function that returns either, called at each
        request.
    :param view: ``view(request)`` returns whether this visitor may see the page: ``True`` or ``False``. Without it,
        everyone who can reach the page may, which is logged once: **it has no login of its own**.
    :param authorize: ``authorize(request)`` returns whether this visitor may release permits, requeue jobs and resize
        semaphores: a name, for the log and the history; ``True`` for a visitor without a name; ``False`` to deny it.
        Without it, the page is read-only.
    :param secret: the key that signs tokens against forged requests; the same in each process that serves the page,
        e.g. your app's secret key. Required with ``authorize``.
    :param refresh: how often the page refreshes, in seconds; 0 turns it off.
    :param title: the heading of the page.
    :param own: tables of the app's own, by the name that the page shows: each a ``Queue``, ``Mutex`` or ``Timeout``.
        They are shown with the shipped tables.
    :param hosts: the host names that the page is served under, e.g. ``["ops.example.org"]``, each with any port. A
        request for another is refused: by DNS rebinding another site could otherwise read a page that is protected by
        its network alone. Without it, the app or its server has to check them.
    :return: a Starlette application, to be mounted under any path.
    :raises ValueError: for ``authorize`` without ``secret``.

    Callbacks take Starlette's ``Request``. They are plain functions, which run in a thread, or coroutine functions.

    >>> from sqlalchemy_locks.integrations import dashboard
    >>> app.mount("/locks", dashboard.asgi(locks))
    """
    if authorize is not None and not secret:
        raise ValueError(
            "authorize= needs secret=, the same in every process that serves the page, e.g. your app's secret key: "
            "with random secrets a worker would refuse the forms of another"
        )
    if isinstance(hosts, str):
        raise TypeError(f"hosts= is a list of host names, not the string {hosts!r}")
    signatures = Signatures(secret or secrets.token_bytes(32))
    options = {"title": title, "refresh": bounded_seconds(refresh, "refresh")}
    tables = dict(own or {})
    for name, table in tables.items():
        if not isinstance(name, str) or not name or not isinstance(table, (Queue, Mutex, Timeout)):
            raise TypeError(f"own= maps names to a Queue, Mutex or Timeout, not {name!r} to {table!r}")
    page = Page(_getter(locks, _check_either), authorize, signatures, tables, options)
    routes = [
        Route("/", functools.partial(page.show, "page.html")),
        Route("/live", functools.partial(page.show, "live.html")),
        Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
    ]
    if authorize is not None:
        routes += [Route(f"/{name}", functools.partial(page.act, name), methods=["POST"]) for name in ACTIONS]
    middleware = [Middleware(_Outermost)]
    if hosts is not None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False))
    if view is None:
        _log.warning("the dashboard %r has no view=: it is open to everyone who can reach it", title)
    return Starlette(
        # the guard is inside the app that answers its exceptions
        routes=[Mount("/", routes=routes, middleware=[Middleware(_Guard, view=view)])],
        middleware=middleware,
        exception_handlers={HTTPException: page.explain},
    )


def wsgi(locks: Locks | Callable[[], Locks], **options: Unpack[PageOptions]) -> WSGI:
    """Return the page as a WSGI application: for Flask, Django, Pyramid, or any server.

    The app of :func:`asgi` runs in an event loop in a thread, which each process starts at its first request.

    :param locks: the ``Locks`` to show, or a function that returns them, called at each request.
    :param options: as for :func:`asgi`. The server's ``environ`` is ``request.scope["wsgi_environ"]``.
    :return: a WSGI application, to be mounted under any path.
    :raises ValueError: for ``authorize`` without ``secret``.
    :raises TypeError: for ``AsyncLocks``, whose connections belong to the event loop of the app.

    >>> from werkzeug.middleware.dispatcher import DispatcherMiddleware
    >>> from sqlalchemy_locks.integrations import dashboard
    >>> app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/locks": dashboard.wsgi(locks)})
    """
    app: Any = asgi(_getter(locks, _check_synchronous), **options)

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            _log.exception("the dashboard failed, in a callback perhaps")
            raise

    @functools.cache
    def bridge(process: int) -> WSGI:
        # it starts a thread, which a fork would not have
        return cast("WSGI", a2wsgi.ASGIMiddleware(cast(Any, logged)))

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            # read completely: the bridge never ends an answer that is read in part, as by a client that disconnects
            body = b"".join(bridge(os.getpid())(environ, start_response))
        except UnicodeError:
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            body = b"The path is not UTF-8."
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return application


class _Outermost:
    """Complete the path of each request, and add the headers of ``_SAFE`` to its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root, app_root = scope.get("root_path", ""), scope.get("app_root_path", "")
        if app_root and not f"{scope['path']}/".startswith(f"{root}/"):
            # a proxy has stripped the prefix that FastAPI(root_path=...) names
            scope = {**scope, "path": app_root + scope["path"]}

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_SAFE)
                headers["Cache-Control"] = "no-cache" if "ETag" in headers else "no-store"
            await send(message)

        await self._app(scope, receive, send_safe)


class _Guard:
    """Refuse requests of visitors that ``view`` denies."""

    def __init__(self, app: ASGIApp, view: Callback | None) -> None:
        self._app, self._view = app, view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not await may_view(self._view, Request(scope)):
            raise HTTPException(403, "You may not see this page.")
        await self._app(scope, receive, send)


def _getter(locks: Any, check: Callable[[Any], L]) -> Callable[[], L]:
    if callable(locks):
        return lambda: check(locks())
    checked = check(locks)
    return lambda: checked


def _check_synchronous(locks: Any) -> Locks:
    if not isinstance(locks, Locks):
        raise TypeError(f"wsgi() takes Locks (FlaskLocks.current), not {locks!r}: AsyncLocks need dashboard.asgi")
    return locks


def _check_either(locks: Any) -> AsyncLocks | Locks:
    if isinstance(locks, Locks):
        return locks
    # needs greenlet, which an app without an async driver doesn't have
    from sqlalchemy_locks.facade.async_locks import AsyncLocks

    if not isinstance(locks, AsyncLocks):
        raise TypeError(f"dashboard.asgi takes AsyncLocks or Locks, not {locks!r}")
    return locks

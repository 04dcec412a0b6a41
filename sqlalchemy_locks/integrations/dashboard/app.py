"""The two doors: a WSGI and an ASGI application, each for the same page."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks.admin.overview import Own
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard.auth import Callback, PageGuard, Settle, settled
from sqlalchemy_locks.integrations.dashboard.http import LONGEST_BODY, Request, Response
from sqlalchemy_locks.integrations.dashboard.views import Page
from sqlalchemy_locks.queue.queue import Queue

if TYPE_CHECKING:
    from sqlalchemy_locks.facade.async_locks import AsyncLocks

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
WSGI = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

_TOO_LONG = Response(b"That is too long.", 413, (("Content-Type", "text/plain; charset=utf-8"),))


def wsgi(
    locks: Locks | Callable[[], Locks],
    *,
    view: Callback | None = None,
    authorize: Callback | None = None,
    secret: str | bytes | None = None,
    refresh: float = 5.0,
    title: str = "Locks",
    own: Mapping[str, Own] | None = None,
) -> WSGI:
    """The page as a WSGI application: for Flask, Django, Pyramid, or any server.

    :param locks: what is shown; or a function that gives it, asked at each request.
    :param view: ``view(request)`` says whether this visitor sees the page: ``True`` or ``False``. Without it, everybody
        does who reaches it: **there is no login of its own**.
    :param authorize: ``authorize(request)`` says who may release permits, give jobs back, and resize semaphores: a
        name, for the records; ``True`` for somebody without one; ``False``: not this visitor. Without it, nobody may.
    :param secret: what tokens against forged requests are signed with; the same in each process that serves the page,
        e.g. your app's secret key. Needed with ``authorize``.
    :param refresh: how often the page looks again, in seconds; 0: not by itself.
    :param title: its heading.
    :param own: what the app has in tables of its own, by what the page calls it: each a ``Queue``, ``Mutex`` or
        ``Timeout``. It is shown with what is in the shipped tables.
    :return: a WSGI application, to be mounted under any path.
    :raises ValueError: for ``authorize`` without ``secret``.

    A request is a :class:`~sqlalchemy_locks.integrations.dashboard.Request`: its ``headers``, ``cookies``, and the
    server's ``environ``.

    >>> from werkzeug.middleware.dispatcher import DispatcherMiddleware
    >>> from sqlalchemy_locks.integrations import dashboard
    >>> app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/locks": dashboard.wsgi(locks)})
    """
    given, others = _giver(locks), _others(own)
    page = Page(lambda: _synchronous(given()), PageGuard(view, authorize, secret), _pause(refresh), title, others)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = _from_environ(environ)
        response = _TOO_LONG if request is None else page.answer(request, settled)
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else response.body
        length = ("Content-Length", str(len(response.body)))
        start_response(f"{response.status} {HTTPStatus(response.status).phrase}", [*response.headers, length])
        return [body]

    return application


def asgi(
    locks: AsyncLocks | Locks | Callable[[], AsyncLocks | Locks],
    *,
    view: Callback | None = None,
    authorize: Callback | None = None,
    secret: str | bytes | None = None,
    refresh: float = 5.0,
    title: str = "Locks",
    own: Mapping[str, Own] | None = None,
) -> ASGI:
    """The page as an ASGI application: for FastAPI, Starlette, Litestar, or any server.

    :param locks: ``AsyncLocks``, which are awaited, or ``Locks``, in a thread; or a function that gives either.
    :param view: :param authorize: as for :func:`wsgi`; coroutine functions, too. The request has a ``scope``.
    :param secret: :param refresh: :param title: :param own: as for :func:`wsgi`.
    :return: an ASGI application, to be mounted under any path.
    :raises ValueError: for ``authorize`` without ``secret``.

    >>> from sqlalchemy_locks.integrations import dashboard
    >>> app.mount("/locks", dashboard.asgi(locks))
    """
    given, others = _giver(locks), _others(own)
    guard, pause = PageGuard(view, authorize, secret), _pause(refresh)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _other(scope, receive, send)
            return
        body = await _body(receive)
        response = _TOO_LONG if body is None else await answer(_from_scope(scope, body))
        await _send(send, response, head=scope["method"] == "HEAD")

    async def answer(request: Request) -> Response:
        shown = given()
        if isinstance(shown, Locks):
            page = Page(lambda: shown, guard, pause, title, others)
            return await asyncio.to_thread(page.answer, request, _from_thread(asyncio.get_running_loop()))
        page = Page(lambda: shown._sync, guard, pause, title, others)
        return await greenlet_spawn(page.answer, request, _awaited)

    return application


def _giver(locks: Any) -> Callable[[], Any]:
    return locks if callable(locks) else lambda: locks


def _synchronous(locks: Any) -> Locks:
    if not isinstance(locks, Locks):
        raise TypeError(f"dashboard.wsgi takes Locks, not {locks!r}: AsyncLocks need dashboard.asgi")
    return locks


def _others(own: Mapping[str, Own] | None) -> Mapping[str, Own]:
    for name, one in (own or {}).items():
        if not isinstance(name, str) or not name or not isinstance(one, (Queue, Mutex, Timeout)):
            raise TypeError(f"own= has a Queue, Mutex or Timeout by each name, not {one!r} by {name!r}")
    return dict(own or {})


def _pause(refresh: float) -> float:
    if isinstance(refresh, bool) or not isinstance(refresh, (int, float)):
        raise TypeError(f"refresh= is seconds, not {refresh!r}")
    if refresh != 0 and not 0.1 <= refresh <= 86400:
        raise ValueError(f"refresh= is 0, or from 0.1 to 86400 seconds, not {refresh!r}")
    return float(refresh)


def _awaited(answer: Any) -> Any:
    return await_only(answer) if inspect.isawaitable(answer) else answer


def _from_thread(loop: asyncio.AbstractEventLoop) -> Settle:
    async def settle(answer: Any) -> Any:
        return await answer

    def have(answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        return asyncio.run_coroutine_threadsafe(settle(answer), loop).result()

    return have


def _from_environ(environ: dict[str, Any]) -> Request | None:
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        length = 0
    if length > LONGEST_BODY:
        return None
    headers = {name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
    if environ.get("CONTENT_TYPE"):
        headers["content-type"] = environ["CONTENT_TYPE"]
    headers.setdefault("host", environ.get("SERVER_NAME", ""))
    return Request(
        method=environ["REQUEST_METHOD"],
        path=environ.get("PATH_INFO", ""),
        root=environ.get("SCRIPT_NAME", "").encode("latin-1").decode("utf-8", "replace"),
        scheme=environ.get("wsgi.url_scheme", "http"),
        headers=headers,
        query_string=environ.get("QUERY_STRING", ""),
        body=environ["wsgi.input"].read(length) if length > 0 else b"",
        environ=environ,
    )


def _from_scope(scope: Scope, body: bytes) -> Request:
    headers: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        headers[name] = f"{headers[name]}; {text}" if name == "cookie" and name in headers else text
    root = scope.get("root_path", "")
    return Request(
        method=scope["method"],
        path=_below(scope["path"], root, scope.get("app_root_path", "")),
        root=root,
        scheme=scope.get("scheme", "http"),
        headers=headers,
        query_string=scope.get("query_string", b"").decode("latin-1"),
        body=body,
        scope=scope,
    )


def _below(path: str, root: str, app_root: str) -> str:
    """The path below the mount: ``root_path`` is part of ``path``, or was cut off, or a part of it was."""
    for mount in (root, root[len(app_root) :] if root.startswith(app_root) else ""):
        if mount and (path == mount or path.startswith(f"{mount}/")):
            return path[len(mount) :]
    return path


async def _body(receive: Receive) -> bytes | None:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > LONGEST_BODY:
            return None
        if not message.get("more_body", False):
            return body


async def _send(send: Send, response: Response, *, head: bool) -> None:
    length = ("Content-Length", str(len(response.body)))
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in (*response.headers, length)]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else response.body})


async def _other(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    # a lifespan, where it is a server's only application
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

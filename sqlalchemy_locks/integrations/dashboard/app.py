"""The page as a WSGI and as an ASGI application."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks.admin.overview import OwnTable
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard.auth import Await, Callback, PageGuard, refuse_awaitable
from sqlalchemy_locks.integrations.dashboard.http import LONGEST_BODY, Request, Response
from sqlalchemy_locks.integrations.dashboard.views import Page
from sqlalchemy_locks.queue.queue import Queue

if TYPE_CHECKING:
    from sqlalchemy_locks.facade.async_locks import AsyncLocks

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
WSGI = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
L = TypeVar("L")
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

_TOO_LONG = Response(b"The request is too long.", 413, (("Content-Type", "text/plain; charset=utf-8"),))


def wsgi(
    locks: Locks | Callable[[], Locks],
    *,
    view: Callback | None = None,
    authorize: Callback | None = None,
    secret: str | bytes | None = None,
    refresh: float = 5.0,
    title: str = "Locks",
    own: Mapping[str, OwnTable] | None = None,
    hosts: Collection[str] | None = None,
) -> WSGI:
    """Return the page as a WSGI application: for Flask, Django, Pyramid, or any server.

    :param locks: the ``Locks`` to show, or a function that returns them, called at each request.
    :param view: ``view(request)`` returns whether this visitor may see the page: ``True`` or ``False``. Without it,
        everyone who can reach the page may: **it has no login of its own**.
    :param authorize: ``authorize(request)`` returns whether this visitor may release permits, requeue jobs and resize
        semaphores: a name, for the log and the history; ``True`` for a visitor without a name; ``False`` to deny it.
        Without it, the page is read-only.
    :param secret: the key that signs tokens against forged requests; the same in each process that serves the page,
        e.g. your app's secret key. Required with ``authorize``.
    :param refresh: how often the page refreshes, in seconds; 0 turns it off.
    :param title: its heading.
    :param own: tables of the app's own, by the name that the page shows: each a ``Queue``, ``Mutex`` or ``Timeout``.
        They are shown with the shipped tables.
    :param hosts: the host names that the page is served under, e.g. ``["ops.example.org"]``, each with any port unless
        it names one. A request for another is refused: by DNS rebinding another site could otherwise read a page that
        is protected by its network alone. Without it, the app or its server has to check them.
    :return: a WSGI application, to be mounted under any path.
    :raises ValueError: for ``authorize`` without ``secret``.

    A request is a :class:`~sqlalchemy_locks.integrations.dashboard.Request`: its ``headers``, ``cookies``, and the
    server's ``environ``.

    >>> from werkzeug.middleware.dispatcher import DispatcherMiddleware
    >>> from sqlalchemy_locks.integrations import dashboard
    >>> app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/locks": dashboard.wsgi(locks)})
    """
    current, own_tables = _getter(locks, _check_synchronous), _check_own(own)
    guard = PageGuard(view, authorize, secret, hosts)
    page = Page(current, guard, _check_refresh(refresh), title, own_tables)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = _from_environ(environ)
        response = _TOO_LONG if request is None else page.answer(request, refuse_awaitable)
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
    own: Mapping[str, OwnTable] | None = None,
    hosts: Collection[str] | None = None,
) -> ASGI:
    """Return the page as an ASGI application: for FastAPI, Starlette, Litestar, or any server.

    :param locks: ``AsyncLocks``, or ``Locks``, which run in a thread; or a function that returns either.
    :param view: :param authorize: as for :func:`wsgi`, or coroutine functions. The request has a ``scope``.
    :param secret: :param refresh: :param title: :param own: :param hosts: as for :func:`wsgi`.
    :return: an ASGI application, to be mounted under any path.
    :raises ValueError: for ``authorize`` without ``secret``.

    >>> from sqlalchemy_locks.integrations import dashboard
    >>> app.mount("/locks", dashboard.asgi(locks))
    """
    current, own_tables = _getter(locks, _check_either), _check_own(own)
    guard, interval = PageGuard(view, authorize, secret, hosts), _check_refresh(refresh)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        body = await _body(receive)
        response = _TOO_LONG if body is None else await answer(_from_scope(scope, body))
        await _send(send, response, head=scope["method"] == "HEAD")

    async def answer(request: Request) -> Response:
        locks = current()
        if isinstance(locks, Locks):
            page = Page(lambda: locks, guard, interval, title, own_tables)
            return await asyncio.to_thread(page.answer, request, _await_from_thread(asyncio.get_running_loop()))
        page = Page(lambda: locks._sync, guard, interval, title, own_tables)
        return await greenlet_spawn(page.answer, request, _await_in_greenlet)

    return application


def _getter(locks: Any, check: Callable[[Any], L]) -> Callable[[], L]:
    if callable(locks):
        return lambda: check(locks())
    checked = check(locks)
    return lambda: checked


def _check_synchronous(locks: Any) -> Locks:
    if not isinstance(locks, Locks):
        raise TypeError(f"dashboard.wsgi takes Locks, not {locks!r}: AsyncLocks need dashboard.asgi")
    return locks


def _check_either(locks: Any) -> AsyncLocks | Locks:
    from sqlalchemy_locks.facade.async_locks import AsyncLocks

    if not isinstance(locks, (AsyncLocks, Locks)):
        raise TypeError(f"dashboard.asgi takes AsyncLocks or Locks, not {locks!r}")
    return locks


def _check_own(own: Mapping[str, OwnTable] | None) -> Mapping[str, OwnTable]:
    if own is not None and not isinstance(own, Mapping):
        raise TypeError(f"own= maps names to a Queue, Mutex or Timeout, not {own!r}")
    for name, one in (own or {}).items():
        if not isinstance(name, str) or not name or not isinstance(one, (Queue, Mutex, Timeout)):
            raise TypeError(f"own= maps names to a Queue, Mutex or Timeout, not {name!r} to {one!r}")
    return dict(own or {})


def _check_refresh(refresh: float) -> float:
    if isinstance(refresh, bool) or not isinstance(refresh, (int, float)):
        raise TypeError(f"refresh= is seconds, not {refresh!r}")
    if refresh != 0 and not 0.1 <= refresh <= 86400:
        raise ValueError(f"refresh= is 0, or from 0.1 to 86400 seconds, not {refresh!r}")
    return float(refresh)


def _await_in_greenlet(answer: Any) -> Any:
    return await_only(answer) if inspect.isawaitable(answer) else answer


def _await_from_thread(loop: asyncio.AbstractEventLoop) -> Await:
    async def wrap(answer: Any) -> Any:
        return await answer

    def wait(answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        return asyncio.run_coroutine_threadsafe(wrap(answer), loop).result()

    return wait


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
        path=_below_mount(scope["path"], root, scope.get("app_root_path", "")),
        root=root,
        scheme=scope.get("scheme", "http"),
        headers=headers,
        query_string=scope.get("query_string", b"").decode("latin-1"),
        body=body,
        scope=scope,
    )


def _below_mount(path: str, root: str, app_root: str) -> str:
    """Return the path below the mount; servers leave all, a part or nothing of ``root_path`` in ``path``."""
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


async def _answer_other(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    # a lifespan: the page is the server's only application
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

"""Locks in a FastAPI app (extra ``fastapi``): a lifespan, and dependencies that hold a lock while an endpoint works.

What is promised: an endpoint runs only while its lock is held, and is told when it isn't any more; whoever waits in
vain is answered ``423 Locked`` or ``429 Too Many Requests``, with ``Retry-After`` and a body of ``problem+json``, which
the OpenAPI schema tells of; two names for one thing don't come about (``templates.py``); and whatever becomes of a
request, it leaves no lock behind.

A lock that is a transaction ends with the endpoint, before the response is sent, so that nobody is told of what was not
committed. Permits and leases end when the response has been sent: streams and background tasks are work, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header
from starlette.applications import Starlette

from sqlalchemy_locks._validation import seconds, timeout_seconds
from sqlalchemy_locks.facade.async_lease import AsyncLease
from sqlalchemy_locks.facade.async_locks import AsyncHeld, AsyncLocks
from sqlalchemy_locks.integrations import openapi
from sqlalchemy_locks.integrations.lock_names import every
from sqlalchemy_locks.integrations.problem import (
    ANOTHER_REQUEST,
    IN_PROGRESS,
    KEY_SPENT,
    LOCKED,
    NO_ROOM,
    NOT_FOUND,
    Kind,
    retry_of,
)
from sqlalchemy_locks.integrations.problem import whole as whole_seconds
from sqlalchemy_locks.integrations.route_locks import Name, RouteLock, Scope
from sqlalchemy_locks.integrations.starlette import LockProblem, StarletteLocks, answer, locks_of
from sqlalchemy_locks.semaphore.base import permit_count

__all__ = [
    "AsyncHeld",
    "AsyncLease",
    "FastAPILocks",
    "LockProblem",
    "answer",
    "document",
    "exclusive",
    "idempotency_key",
    "lease",
    "locks_of",
    "required_key",
    "semaphore",
    "shared",
]

#: ``retry_after`` is about these
_TO_WAIT_FOR = (LOCKED, NO_ROOM, IN_PROGRESS)


def _key() -> Any:
    about = "The same for each try of one request: it is done once."
    return Header(alias="Idempotency-Key", min_length=1, max_length=255, description=about)


def idempotency_key(key: Annotated[str | None, _key()] = None) -> str | None:
    """The header ``Idempotency-Key``, where the client sends one.

    >>> @app.post("/exports")
    ... async def export(key: Annotated[str | None, Depends(idempotency_key)]) -> None: ...
    """
    return key


def required_key(key: Annotated[str, _key()]) -> str:
    """The header ``Idempotency-Key``, without which a request is refused.

    >>> @app.post("/exports", dependencies=[semaphore("exports", key=required_key)])
    ... async def export() -> None: ...
    """
    return key


class FastAPILocks(StarletteLocks):
    """The ``AsyncLocks`` of an app, with a lifespan. The engine is the app's, and is not disposed of.

    >>> locks = FastAPILocks(async_engine)
    >>> app = FastAPI(lifespan=locks.lifespan)
    """

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """As :meth:`StarletteLocks.lifespan`; and the names of the locks of all routes are checked, and documented.

        :raises ValueError: for a name that a route has no parameter for.
        """
        if isinstance(app, FastAPI):
            check(app)
            document(app)
        async with super().lifespan(app):
            yield


def exclusive(
    *names: Name,
    timeout: float | timedelta | None = 5,
    scope: Scope = "function",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold keys alone while the endpoint works, in a transaction that is committed when it has.

    :param names: one or more: with parameters of the route in braces (``"invoice:{invoice_id}"``), or a dependency that
        gives the name.
    :param timeout: the longest wait, in seconds or as a ``timedelta``; ``None`` waits, ``0`` tries once.
    :param scope: ``"function"``: the transaction ends with the endpoint, before the response is sent; where it can't be
        committed, the client is not told that it was. ``"request"``: when the response is sent, and the background
        tasks are done.
    :param retry_after: what a client that waited in vain is told, in seconds or as a ``timedelta``; by default its
        wait, at least 1 and at most 60.
    :param locks: those to use instead of the app's own: ``AsyncLocks``, or a dependency that gives some.
    :return: a dependency, for ``Annotated`` or ``dependencies=[...]``: it is the ``Depends`` itself. What it gives is a
        :class:`~sqlalchemy_locks.aio.AsyncHeld`, whose ``session`` works in the transaction that holds the lock.

    An endpoint that raises has its transaction rolled back; one that returns a response of whatever status, committed.
    Contention is answered 423, a value that can't be part of a name 422.

    >>> @app.post("/invoices/{invoice_id}/charge")
    ... async def charge(invoice_id: int, held: Annotated[AsyncHeld, exclusive("invoice:{invoice_id}")]) -> None:
    ...     (await held.session.get_one(Invoice, invoice_id)).charged += 1
    """
    return _keys("exclusive", names, timeout, scope, retry_after, locks)


def shared(
    *names: Name,
    timeout: float | timedelta | None = 5,
    scope: Scope = "function",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold keys together with other sharers while the endpoint works. Everything else as :func:`exclusive`.

    >>> @app.get("/prices", dependencies=[shared("prices")])
    ... async def prices() -> list[Price]: ...
    """
    return _keys("shared", names, timeout, scope, retry_after, locks)


def semaphore(
    permits: Name | Mapping[str, int],
    *,
    count: int | None = None,
    ttl: float | timedelta = 60,
    timeout: float | timedelta | None = 5,
    key: Callable[..., Any] | None = idempotency_key,
    unless: Callable[..., Any] | None = None,
    reclaim: bool = False,
    scope: Scope = "request",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold permits while the endpoint works and its response is sent, renewed in the background.

    :param permits: a semaphore's name, as :func:`exclusive` takes it, or how many of each of several.
    :param count: how many permits of the one that was given by its name; 1 without it.
    :param ttl: when they come back from a process that died, in seconds or as a ``timedelta``, at least a second.
    :param timeout: :param retry_after: :param locks: as for :func:`exclusive`; the wait at least 5.
    :param key: a dependency that gives the request's ``external_id``, or ``None`` for none: by default the header
        ``Idempotency-Key``, where there is one; :func:`required_key` demands it. A key is the same request's, whoever
        sends it: a dependency of yours can put in front of it who asks.
    :param unless: a dependency: where what it gives is true, no permit is taken, and the endpoint gets ``None``. For
        what was answered before.
    :param reclaim: let a key be worked on again whose time ran out before it was done, since its process died. The
        first try may have done some of it, or all but the answer: for an endpoint that knows what was done before.
    :param scope: ``"function"``: they are released before the response is sent.
    :return: a dependency, as :func:`exclusive`; what it gives is an :class:`~sqlalchemy_locks.AsyncLease`.

    No room is answered 429. The same key again is answered 409: *in-progress* with ``Retry-After`` while it is held,
    *key-spent* when it is over, finished or not (but for ``reclaim``), *another-request* when it was for other permits.
    A request that was answered 429 may come again with its key.

    >>> @app.post("/exports", dependencies=[semaphore("exports", ttl=60, timeout=0)])
    ... async def export() -> FileResponse: ...
    """
    if callable(permits) or isinstance(permits, str):
        names: Sequence[Name] = [permits]
        counts = [1 if count is None else permit_count(count, "a count of permits", 1)]
    elif count is not None:
        raise TypeError("count is for one semaphore that is given by its name: a mapping has its counts in it")
    else:
        names, counts = list(permits), [permit_count(one, "a count of permits", 1) for one in permits.values()]
        if not names:
            raise ValueError("semaphore needs at least one semaphore")
    held_for, patience = _held_for(ttl), timeout_seconds(timeout)

    def block(held: AsyncLocks, filled: list[str], ident: Any) -> AbstractAsyncContextManager[Any]:
        wanted: dict[str, int] = {}
        for name, number in zip(filled, counts, strict=True):
            wanted[name] = wanted.get(name, 0) + number
        return held.semaphore(wanted, ttl=held_for, timeout=patience, external_id=ident, resume=False, reclaim=reclaim)

    kinds = (NO_ROOM, NOT_FOUND, *((IN_PROGRESS, ANOTHER_REQUEST, KEY_SPENT) if key is not None else ()))
    retry = _retry(retry_after, patience)
    return Depends(RouteLock(names, block, kinds, scope, retry, locks, key, unless), scope=scope)


def lease(
    name: Name,
    *,
    ttl: float | timedelta = 60,
    timeout: float | timedelta | None = 5,
    scope: Scope = "request",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold a lease while the endpoint works and its response is sent: a semaphore of one, made on first use.

    Unlike :func:`exclusive` it keeps no transaction, and unlike a semaphore it is answered 423 when another has it.
    Everything else as :func:`semaphore`; ``grant.fence[name]`` is the fencing token.

    >>> @app.post("/reports/{day}", dependencies=[lease("report:{day}", ttl=60, timeout=0)])
    ... async def report(day: date) -> StreamingResponse: ...
    """
    held_for, patience = _held_for(ttl), timeout_seconds(timeout)

    def block(held: AsyncLocks, filled: list[str], _: Any) -> AbstractAsyncContextManager[Any]:
        return held.lease(filled[0], ttl=held_for, timeout=patience)

    return Depends(RouteLock([name], block, (LOCKED,), scope, _retry(retry_after, patience), locks), scope=scope)


def _keys(
    how: Literal["exclusive", "shared"],
    names: Sequence[Name],
    timeout: float | timedelta | None,
    scope: Scope,
    retry_after: float | timedelta | None,
    locks: AsyncLocks | Callable[..., Any],
) -> Any:
    if not names:
        raise ValueError("give at least one name to lock")
    patience = timeout_seconds(timeout)

    def block(held: AsyncLocks, filled: list[str], _: Any) -> AbstractAsyncContextManager[Any]:
        return (held.exclusive if how == "exclusive" else held.shared)(*filled, timeout=patience)

    return Depends(RouteLock(names, block, (LOCKED,), scope, _retry(retry_after, patience), locks), scope=scope)


def _held_for(ttl: float | timedelta) -> float:
    held_for = seconds(ttl, "ttl")
    if held_for < 1:
        raise ValueError(f"ttl is at least 1 second, not {ttl!r}")
    return held_for


def _retry(retry_after: float | timedelta | None, patience: float | None) -> Callable[[Kind], float | None]:
    told = None if retry_after is None else whole_seconds(retry_after)
    return lambda kind: told if told is not None and kind in _TO_WAIT_FOR else retry_of(kind, patience)


def _guards(route: Any) -> list[RouteLock]:
    return [one.call for one in every(route.dependant) if isinstance(one.call, RouteLock)]


def check(app: FastAPI) -> None:
    """Refuse names of locks that their routes can't make; the lifespan does it.

    :raises ValueError: with what to do instead.
    """
    for route in openapi.routes_of(app):
        for guard in _guards(route):
            guard.check(route)


def document(app: FastAPI) -> None:
    """Have the OpenAPI schema tell what locks answer; the lifespan does it. For who makes the schema without a server.

    >>> document(app)
    >>> schema = app.openapi()
    """
    openapi.document(app, lambda call: call.kinds if isinstance(call, RouteLock) else ())

"""Locks in a FastAPI app (extra ``fastapi``): dependencies that hold a lock while an endpoint works.

- An endpoint runs only while its lock is held, and can see that it was lost.
- Contention is answered ``423 Locked`` or ``429 Too Many Requests``, with ``Retry-After`` and a body of
  ``problem+json``.
- One thing can't have two names (``lock_names.py``).
- A request leaves no lock behind, however it ends.

A lock held by a transaction ends with the endpoint, before the response is sent, so that no response reports work
that was not committed. A lease also ends before the response, so that the client's next request can acquire it. Permits
of a semaphore are released when the response has been sent, streams and background tasks included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Annotated, Any, Literal

from sqlalchemy_locks.integrations import missing

try:
    from fastapi import Depends, Header
except ModuleNotFoundError as error:
    raise missing("fastapi", error) from error

from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.facade.async_lease import AsyncLease
from sqlalchemy_locks.facade.async_locks import AsyncHeld, AsyncLocks
from sqlalchemy_locks.integrations.problem import IN_PROGRESS, LOCKED, NO_ROOM, Kind, retry_of, retry_seconds
from sqlalchemy_locks.integrations.route_locks import Name, RouteLock, Scope
from sqlalchemy_locks.integrations.starlette import LockProblem, StarletteLocks, answer, locks_of

__all__ = [
    "AsyncHeld",
    "AsyncLease",
    "LockProblem",
    "StarletteLocks",
    "answer",
    "exclusive",
    "idempotency_key",
    "lease",
    "locks_of",
    "required_key",
    "semaphore",
    "shared",
]

#: the kinds of problems that ``retry_after`` is sent with
_RETRIED = (LOCKED, NO_ROOM, IN_PROGRESS)


def _key() -> Any:
    description = "The same for each attempt of one request, which is processed once."
    return Header(alias="Idempotency-Key", min_length=1, max_length=255, description=description)


def idempotency_key(key: Annotated[str | None, _key()] = None) -> str | None:
    """Return the header ``Idempotency-Key``, or ``None``.

    >>> @app.post("/exports")
    ... async def export(key: Annotated[str | None, Depends(idempotency_key)]) -> None: ...
    """
    return key


def required_key(key: Annotated[str, _key()]) -> str:
    """Return the header ``Idempotency-Key``; a request without it is refused.

    >>> @app.post("/exports", dependencies=[semaphore("exports", key=required_key)])
    ... async def export() -> None: ...
    """
    return key


def exclusive(
    *names: Name,
    timeout: float | timedelta | None = 5,
    scope: Scope = "function",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold keys exclusively while the endpoint works, in a transaction that is committed when it returns.

    :param names: one or more, each with parameters of the path in braces (``"invoice:{invoice_id}"``), or a dependency
        that returns the name.
    :param timeout: the longest wait, in seconds or as a ``timedelta``; ``None`` waits indefinitely, ``0`` tries once.
    :param scope: ``"function"``: the transaction ends with the endpoint, before the response is sent; if it can't be
        committed, the client gets an error. ``"request"``: it ends when the response has been sent and the
        background tasks are done. An endpoint that streams needs this, or it would work on without its lock.
    :param retry_after: the ``Retry-After`` of an answer to contention, in seconds or as a ``timedelta``; by default the
        timeout, at least 1 and at most 60 seconds.
    :param locks: ``AsyncLocks`` to use instead of the app's, or a dependency that returns them.
    :return: the ``Depends``, for ``Annotated`` or ``dependencies=[...]``. Its value is a
        :class:`AsyncHeld`, whose ``session`` works in the transaction that holds the lock.

    The transaction is rolled back when the endpoint raises, and committed when it returns a response of any status.
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
    """Hold keys shared while the endpoint works. Everything else as :func:`exclusive`.

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
    scope: Scope = "request",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold permits while the endpoint works and its response is sent, renewed in the background.

    :param permits: a semaphore's name, as :func:`exclusive` takes it, or a mapping of names to counts.
    :param count: the number of permits of a semaphore given by its name; by default 1.
    :param ttl: the time to live, in seconds or as a ``timedelta``, at least a second: after it the permits of a process
        that died are released.
    :param timeout: :param locks: as for :func:`exclusive`.
    :param retry_after: as for :func:`exclusive`; by default at least 5 seconds.
    :param key: a dependency that returns the request's ``external_id``, or ``None`` for none: by default the header
        ``Idempotency-Key``, if there is one; :func:`required_key` requires it. Equal keys of different clients are one
        request: put the client's identity into the key by a dependency of your own.
    :param unless: a dependency; when it returns a true value, no permit is acquired, and the endpoint gets ``None``.
        For requests that were answered before.
    :param scope: ``"function"`` releases the permits before the response is sent.
    :return: as :func:`exclusive`; the value is an :class:`~sqlalchemy_locks.AsyncLease`.

    A full semaphore is answered 429. A repeated key is answered 409: *in-progress* with ``Retry-After`` while its
    request is processed, *key-spent* when that has ended, *another-request* when it was for other permits. With
    ``unless``, *key-spent* has a ``Retry-After``: the answer may have been stored since ``unless`` looked for it.

    A key is processed again after a 429. It is also processed again after an endpoint that raised, and ``ttl`` after
    the death of its process: then some of the work may already be done.

    A request whose permits were lost is answered 503 with ``scope="function"``; otherwise its response has been sent,
    and the loss is logged.

    >>> @app.post("/exports", dependencies=[semaphore("exports", ttl=60, timeout=0)])
    ... async def export() -> FileResponse: ...
    """
    if callable(permits) or isinstance(permits, str):
        names: Sequence[Name] = [permits]
        counts = [1 if count is None else count]
    elif count is not None:
        raise TypeError("count is for one semaphore that is given by its name: a mapping has its counts in it")
    else:
        names, counts = list(permits), list(permits.values())
        if not names:
            raise ValueError("semaphore needs at least one semaphore")
    wait = timeout_seconds(timeout)

    def block(of: AsyncLocks, request_names: list[str], external_id: Any) -> AbstractAsyncContextManager[Any]:
        requested: dict[str, int] = {}
        for name, number in zip(request_names, counts, strict=True):
            requested[name] = requested.get(name, 0) + number
        return of.semaphore(requested, ttl=ttl, timeout=wait, external_id=external_id)

    return Depends(RouteLock(names, block, scope, _retry(retry_after, wait), locks, key, unless), scope=scope)


def lease(
    name: Name,
    *,
    ttl: float | timedelta = 60,
    timeout: float | timedelta | None = 5,
    scope: Scope = "function",
    retry_after: float | timedelta | None = None,
    locks: AsyncLocks | Callable[..., Any] = locks_of,
) -> Any:
    """Hold a lease while the endpoint works: a semaphore of one, made on first use.

    It is released before the response is sent, so that the client's next request doesn't contend with this one.

    :param scope: ``"request"`` releases the lease when the response has been sent and the background tasks are done; an
        endpoint that streams needs this.

    Unlike :func:`exclusive` it keeps no transaction open; unlike :func:`semaphore` contention is answered 423.
    Everything else as :func:`semaphore`; ``grant.fence[name]`` is the fencing token.

    >>> @app.post("/reports/{day}", dependencies=[lease("report:{day}", ttl=60, timeout=0)])
    ... async def report(day: date) -> None: ...
    """
    wait = timeout_seconds(timeout)

    def block(of: AsyncLocks, request_names: list[str], _: Any) -> AbstractAsyncContextManager[Any]:
        return of.lease(request_names[0], ttl=ttl, timeout=wait)

    return Depends(RouteLock([name], block, scope, _retry(retry_after, wait), locks), scope=scope)


def _keys(
    mode: Literal["exclusive", "shared"],
    names: Sequence[Name],
    timeout: float | timedelta | None,
    scope: Scope,
    retry_after: float | timedelta | None,
    locks: AsyncLocks | Callable[..., Any],
) -> Any:
    if not names:
        raise ValueError("give at least one name to lock")
    wait = timeout_seconds(timeout)

    def block(of: AsyncLocks, request_names: list[str], _: Any) -> AbstractAsyncContextManager[Any]:
        return (of.exclusive if mode == "exclusive" else of.shared)(*request_names, timeout=wait)

    return Depends(RouteLock(names, block, scope, _retry(retry_after, wait), locks), scope=scope)


def _retry(retry_after: float | timedelta | None, wait: float | None) -> Callable[[Kind], float | None]:
    seconds = None if retry_after is None else retry_seconds(retry_after)
    return lambda kind: seconds if seconds is not None and kind in _RETRIED else retry_of(kind, wait)

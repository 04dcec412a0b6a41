"""Locks in a Starlette app: a lifespan that runs their maintenance, and answers to contention.

The lifespan ends only what it has started: the app makes and disposes of the engine. An answer is a ``problem``
(``problem.py``) without details of the server; an error that only the operator can fix is raised again, for the
server's log.

``fastapi.py`` builds on this module.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from sqlalchemy_locks._validation import bounded_seconds, escape_unprintable
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.async_locks import AsyncAlive, AsyncLocks
from sqlalchemy_locks.facade.sweep import Alive
from sqlalchemy_locks.integrations.problem import Problem, problem_of

__all__ = ["LockProblem", "StarletteLocks", "answer", "locks_of"]

#: where an app keeps its locks, in ``app.state``
STATE = "sqlalchemy_locks"
_log = logging.getLogger("sqlalchemy_locks")


class StarletteLocks(AsyncLocks):
    """The ``AsyncLocks`` of an app, with a lifespan.

    :param bind: :param owner: as for :class:`~sqlalchemy_locks.AsyncLocks`; the engine stays open.
    :param alive: returns which owners are alive, for the sweep; as for ``AsyncLocks.maintenance``.
    :param maintain_every: how often to check whether maintenance is due, in seconds or as a ``timedelta``; ``None``
        turns it off, where something else runs it.

    >>> locks = StarletteLocks(async_engine)
    >>> app = Starlette(routes=routes, lifespan=locks.lifespan, exception_handlers={sl.LockError: answer})
    """

    def __init__(
        self,
        bind: AsyncEngine | async_sessionmaker[Any],
        *,
        owner: str | None = None,
        alive: Alive | AsyncAlive | None = None,
        maintain_every: float | timedelta | None = 60,
    ) -> None:
        super().__init__(bind, owner=owner)
        if maintain_every is not None:
            bounded_seconds(maintain_every, "maintain_every", zero=False)
        self._alive, self._maintain_every = alive, maintain_every

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Run maintenance in the background, with these locks in ``app.state``.

        Pass it to the app as ``lifespan``, or enter it with ``async with`` inside a lifespan of your own.

        >>> @asynccontextmanager
        ... async def lifespan(app):
        ...     async with locks.lifespan(app):
        ...         yield
        ...     await async_engine.dispose()
        """
        async with contextlib.AsyncExitStack() as stack:
            setattr(app.state, STATE, self)
            stack.callback(delattr, app.state, STATE)
            if self._maintain_every is not None:
                await stack.enter_async_context(self.maintenance(alive=self._alive, every=self._maintain_every))
            yield


def locks_of(connection: HTTPConnection) -> AsyncLocks:
    """Return the locks of a request's app.

    :raises RuntimeError: when its lifespan is not running.

    >>> async def homepage(request: Request) -> Response:
    ...     async with locks_of(request).exclusive("homepage"):
    ...         return Response("alone")
    """
    locks = getattr(connection.app.state, STATE, None)
    if not isinstance(locks, AsyncLocks):
        raise RuntimeError(
            "this app has no locks: give it lifespan=locks.lifespan (a mounted app has none of its own, and a test "
            "client may not run it), or override locks_of"
        )
    return locks


class LockProblem(HTTPException):
    """A request that failed because of a lock; ``problem`` is the answer, and ``__cause__`` the error.

    >>> app = FastAPI(lifespan=locks.lifespan, exception_handlers={LockProblem: in_our_way})
    """

    def __init__(self, problem: Problem) -> None:
        headers = {name: value for name, value in problem.headers.items() if name != "Content-Type"}
        super().__init__(problem.status, str(problem.body["detail"]), headers)
        self.problem = problem


async def answer(request: Request, error: Exception) -> Response:
    """An exception handler for :class:`~sqlalchemy_locks.errors.LockError`, and for :class:`LockProblem`.

    Contention is answered 423, 429 or 409, a lost lock 503; any other error is raised again, for a 500.

    >>> app = FastAPI(lifespan=locks.lifespan, exception_handlers={sl.LockError: answer})
    """
    if isinstance(error, LockProblem):
        problem = error.problem
    elif isinstance(error, LockError):
        problem = problem_of(error)
        if problem.status == 500:
            raise error
    else:
        raise error
    if problem.status in (404, 503):  # possibly the service's own fault
        request_line = escape_unprintable(f"{request.scope.get('method', '')} {request.url.path}")
        _log.warning("%s was answered %s: %s", request_line, problem.status, error.__cause__ or error)
    return Response(problem.content, problem.status, problem.headers)

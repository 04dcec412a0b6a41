"""A lock of a route: the dependency that FastAPI calls for each request.

The endpoint runs while the lock is held, or not at all; its exceptions are passed on unchanged; contention is answered
with a ``LockProblem``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from fastapi import Depends
from fastapi.responses import StreamingResponse
from starlette.requests import HTTPConnection

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.errors import LockError, RequestOver, UnknownSemaphore
from sqlalchemy_locks.facade.async_lease import AsyncLease
from sqlalchemy_locks.facade.async_locks import AsyncLocks
from sqlalchemy_locks.integrations.lock_names import Parameters, Template
from sqlalchemy_locks.integrations.problem import (
    ANSWERED,
    BAD_NAME,
    FAILED,
    KEY_SPENT,
    LOST,
    NOT_FOUND,
    UNKNOWN_OUTCOME,
    Kind,
    kind_of,
    problem,
)
from sqlalchemy_locks.integrations.starlette import LockProblem, answer
from sqlalchemy_locks.semaphore.availability import ended_ago

#: a name with the route's parameters in braces, or a dependency that returns the name
Name = str | Callable[..., Any]
#: when a lock ends: with the endpoint, or when the response has been sent and the background tasks are done
Scope = Literal["function", "request"]
#: makes a request's block from the locks, the names, and the idempotency key
MakeBlock = Callable[[AsyncLocks, list[str], Any], AbstractAsyncContextManager[Any]]

_HANDLERS = "starlette.exception_handlers"
#: seconds after the end of a request within which its answer may have been stored since it was looked for
_ANSWER_WITHIN = 60
_log = logging.getLogger("sqlalchemy_locks")


class RouteLock:
    """A lock of one or more routes, as FastAPI's dependency."""

    def __init__(
        self,
        names: Sequence[Name],
        make_block: MakeBlock,
        kinds: Iterable[Kind],
        scope: Scope,
        retry: Callable[[Kind], float | None],
        locks: AsyncLocks | Callable[..., Any],
        key: Callable[..., Any] | None = None,
        unless: Callable[..., Any] | None = None,
    ) -> None:
        if scope not in ("function", "request"):
            raise ValueError(f'scope is "function" or "request", not {scope!r}')
        self._make_block, self._scope, self._retry = make_block, scope, retry
        self._locks = locks if isinstance(locks, AsyncLocks) else None
        #: in the order of the names; None for one that a dependency returns
        self._templates = [None if callable(name) else Template(name) for name in names]
        self.fields = [field for template in self._templates if template is not None for field in template.fields]
        self._parameters: dict[int, tuple[Any, Parameters]] = {}
        #: the parameters of this dependency, which FastAPI reads from its signature
        parameters: dict[str, Any] = {"connection": HTTPConnection}
        dependencies = {"unless": unless, "locks": None if isinstance(locks, AsyncLocks) else locks, "key": key}
        dependencies |= {f"name_{number}": name for number, name in enumerate(names) if callable(name)}
        for name, dependency in dependencies.items():
            if dependency is not None:
                parameters[name] = Annotated[Any, Depends(dependency)]
        #: whether the name depends on the request
        self._dynamic = bool(self.fields) or None in self._templates
        bad = (BAD_NAME,) if self._dynamic or key is not None else ()
        self.kinds = [kind for kind in (*kinds, *bad, LOST, UNKNOWN_OUTCOME) if self._dynamic or kind is not NOT_FOUND]
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=of) for name, of in parameters.items()]
        )

    async def __call__(self, *, connection: HTTPConnection, **given: Any) -> AsyncIterator[Any]:
        """Hold the lock while the endpoint works."""
        if given.get("unless"):
            yield None
            return
        route = connection.scope["route"]
        values: dict[str, str] = {}
        try:
            if self.fields:
                values = self._parameters_of(route, route.path_format).values(self.fields, connection)
            names = [
                valid_name(given[f"name_{number}"], "a lock's name") if template is None else template.fill(values)
                for number, template in enumerate(self._templates)
            ]
            key = None if given.get("key") is None else valid_name(given["key"], "an idempotency key")
        except ValueError as error:
            raise self._problem(connection, BAD_NAME) from error
        locks = self._locks or given["locks"]
        block = self._make_block(locks, names, key)
        try:
            held = await block.__aenter__()
        except RequestOver as error:
            kind = await self._kind_of_spent(locks, key) if ANSWERED in self.kinds else KEY_SPENT
            raise self._problem(connection, kind) from error
        except LockError as error:
            self._refuse(connection, error)
            raise
        try:
            yield held
        except BaseException as error:
            # the endpoint's own exception is for the app's handlers
            if not await block.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            try:
                await block.__aexit__(None, None, None)
            except LockError as error:
                if self._scope == "function":  # otherwise the response has been sent
                    self._refuse(connection, error)
                elif isinstance(held, AsyncLease):
                    # no work was lost with it, and a handler for the error could answer nothing
                    where = f"{connection.scope.get('method', '')} {connection.url.path}".strip()
                    _log.error("%s was answered, but did not hold its permits to the end: %s", where, error)
                    return
                raise

    async def _kind_of_spent(self, locks: AsyncLocks, key: Any) -> Kind:
        """Return whether the answer may have been stored since it was looked for."""
        try:
            ago = await locks.run(ended_ago(key))
        except LockError:
            return ANSWERED  # the client asks again, which finds it
        return KEY_SPENT if ago is None or ago > _ANSWER_WITHIN else ANSWERED

    def check(self, route: Any) -> None:
        """Refuse a route that can't have this lock.

        :raises ValueError: with what to do instead.
        """
        if self.fields:
            self._parameters_of(getattr(route, "original_route", route), route.path_format)
        if self._scope == "function" and _streams(route):
            raise ValueError(
                f"the route {route.path_format} streams its response, and its lock would end before that: give "
                'the lock scope="request"'
            )

    def _parameters_of(self, route: Any, path: str) -> Parameters:
        entry = self._parameters.get(id(route))
        if entry is None:
            parameters = Parameters(route.dependant)
            for template in self._templates:
                if template is not None:
                    parameters.check(template, f"the route {path}")
            # the reference to the route keeps its id from being reused
            entry = self._parameters[id(route)] = route, parameters
        return entry[1]

    def _refuse(self, connection: HTTPConnection, error: LockError) -> None:
        kind = NOT_FOUND if self._dynamic and isinstance(error, UnknownSemaphore) else kind_of(error)
        if kind is not FAILED:
            raise self._problem(connection, kind) from error

    def _problem(self, connection: HTTPConnection, kind: Kind) -> LockProblem:
        # A dependency can't register a handler with the app, which would answer this as any HTTPException: with the
        # same status and Retry-After, but another body.
        handlers = connection.scope.get(_HANDLERS)
        if handlers:
            handlers[0].setdefault(LockProblem, answer)
        return LockProblem(problem(kind, retry_after=self._retry(kind)))


def _streams(route: Any) -> bool:
    endpoint = getattr(route, "endpoint", None)
    if inspect.isasyncgenfunction(endpoint) or inspect.isgeneratorfunction(endpoint):
        return True
    response = getattr(route, "response_class", None)
    try:
        returned = inspect.signature(endpoint, eval_str=True).return_annotation if endpoint else None
    except (NameError, TypeError, ValueError):
        returned = None
    candidates = (response, returned, *_called_by(endpoint))
    return any(isinstance(one, type) and issubclass(one, StreamingResponse) for one in candidates)


def _called_by(endpoint: Any) -> Iterator[Any]:
    """Yield the objects that an endpoint's code names: few endpoints annotate what they return."""
    try:
        used = inspect.getclosurevars(inspect.unwrap(endpoint))
    except (TypeError, ValueError):
        return
    for one in (*used.nonlocals.values(), *used.globals.values()):
        yield one
        if inspect.ismodule(one):
            yield from (getattr(one, name, None) for name in used.unbound)

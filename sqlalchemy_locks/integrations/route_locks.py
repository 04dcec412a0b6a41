"""A lock of a route: the dependency that FastAPI calls for each request.

The endpoint runs while the lock is held, or not at all; its exceptions are passed on unchanged; contention is answered
with a ``LockProblem``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import Depends
from starlette.requests import HTTPConnection
from starlette.responses import Response

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.errors import LockError, RequestOver, UnknownSemaphore
from sqlalchemy_locks.facade.async_lease import AsyncLease
from sqlalchemy_locks.facade.async_locks import AsyncLocks
from sqlalchemy_locks.integrations.lock_names import Template, path_values
from sqlalchemy_locks.integrations.problem import (
    ANSWERED,
    BAD_NAME,
    FAILED,
    KEY_SPENT,
    NOT_FOUND,
    Kind,
    kind_of,
    problem,
)
from sqlalchemy_locks.integrations.starlette import LockProblem, answer

#: a name with the route's parameters in braces, or a dependency that returns the name
Name = str | Callable[..., Any]
#: when a lock ends: with the endpoint, or when the response has been sent and the background tasks are done
Scope = Literal["function", "request"]
#: makes a request's block from the locks, the names, and the idempotency key
MakeBlock = Callable[[AsyncLocks, list[str], Any], AbstractAsyncContextManager[Any]]

_HANDLERS = "starlette.exception_handlers"
_log = logging.getLogger("sqlalchemy_locks")


class RouteLock:
    """A lock of one or more routes, as FastAPI's dependency."""

    def __init__(
        self,
        names: Sequence[Name],
        make_block: MakeBlock,
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
        self._fields = [field for template in self._templates if template is not None for field in template.fields]
        #: the parameters of this dependency, which FastAPI reads from its signature
        parameters: dict[str, Any] = {"connection": HTTPConnection}
        dependencies = {"unless": unless, "locks": None if isinstance(locks, AsyncLocks) else locks, "key": key}
        dependencies |= {f"name_{number}": name for number, name in enumerate(names) if callable(name)}
        for name, dependency in dependencies.items():
            if dependency is not None:
                parameters[name] = Annotated[Any, Depends(dependency)]
        #: whether the name depends on the request
        self._dynamic = bool(self._fields) or None in self._templates
        # the first request may have ended since `unless` looked for its answer
        self._spent = KEY_SPENT if unless is None else ANSWERED
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=of) for name, of in parameters.items()]
        )

    async def __call__(self, *, connection: HTTPConnection, **values: Any) -> AsyncIterator[Any]:
        """Hold the lock while the endpoint works."""
        if values.get("unless"):
            yield None
            return
        route = connection.scope["route"]
        response_class = getattr(route, "response_class", None)
        # FastAPI wraps the default in another object
        response_class = getattr(response_class, "value", response_class)
        if self._scope == "function" and _declares_stream(connection.scope["endpoint"], response_class):
            raise _refused(route)
        try:
            texts = {}
            if self._fields:
                texts = path_values(route.dependant, self._fields, connection)
            names = [
                valid_name(values[f"name_{number}"], "a lock's name") if template is None else template.fill(texts)
                for number, template in enumerate(self._templates)
            ]
            key = None if values.get("key") is None else valid_name(values["key"], "an idempotency key")
        except ValueError as error:
            raise self._problem(connection, BAD_NAME) from error
        locks = self._locks or values["locks"]
        block = self._make_block(locks, names, key)
        try:
            held = await block.__aenter__()
        except RequestOver as error:
            raise self._problem(connection, self._spent) from error
        except LockError as error:
            self._refuse(connection, error)
            raise
        try:
            yield held
            if (
                self._scope == "function"
                and connection.scope["type"] == "http"
                and _streams(type(_response_of_caller()))
            ):
                raise _refused(route)
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
                    # no work was lost with the permits, and an error handler could not answer any more
                    where = f"{connection.scope.get('method', '')} {connection.url.path}".strip()
                    _log.error("%s was answered, but did not hold its permits to the end: %s", where, error)
                    return
                raise

    def _refuse(self, connection: HTTPConnection, error: LockError) -> None:
        kind = NOT_FOUND if self._dynamic and isinstance(error, UnknownSemaphore) else kind_of(error)
        if kind is not FAILED:
            raise self._problem(connection, kind) from error

    def _problem(self, connection: HTTPConnection, kind: Kind) -> LockProblem:
        # A dependency can't register a handler with the app. Without one, the app answers this like any HTTPException:
        # with the same status and Retry-After, but another body.
        handlers = connection.scope.get(_HANDLERS)
        if handlers:
            handlers[0].setdefault(LockProblem, answer)
        return LockProblem(problem(kind, retry_after=self._retry(kind)))


def _refused(route: Any) -> ValueError:
    return ValueError(
        f"the route {route.path} streams its response, and its lock would end before that: give the lock "
        'scope="request"'
    )


def _streams(response_class: type[Response]) -> bool:
    """Return whether a class sends its responses by code of its own, which works on after the endpoint."""
    return response_class.__call__ is not Response.__call__


@lru_cache(1024)
def _declares_stream(endpoint: Any, response_class: Any) -> bool:
    """Return whether an endpoint declares that it streams: it is then refused before it has done anything."""
    for function in (endpoint, inspect.unwrap(endpoint), endpoint.__call__):
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            return True
    try:
        returned = inspect.signature(endpoint, eval_str=True).return_annotation
    except (NameError, TypeError, ValueError):
        returned = None
    return any(
        isinstance(one, type) and issubclass(one, Response) and _streams(one) for one in (response_class, returned)
    )


def _response_of_caller() -> Response:
    """Return the response that FastAPI is about to send.

    FastAPI doesn't pass the response to a dependency. But it waits for the dependency's end in a function that has the
    response in a local variable.
    """
    frame = inspect.currentframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Response):
                return value
        frame = frame.f_back
    raise RuntimeError('this release of FastAPI hides the response from a lock: give the lock scope="request"')

"""One lock of a route: what FastAPI calls for each request, from the lock's name to its end.

What is promised: the endpoint runs while the lock is held, or not at all; what it raises goes on unchanged; and whoever
waited in vain is answered by a ``LockProblem``.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from fastapi import Depends
from fastapi.responses import StreamingResponse
from starlette.requests import HTTPConnection

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.errors import LockError, UnknownSemaphore
from sqlalchemy_locks.facade.async_locks import AsyncLocks
from sqlalchemy_locks.integrations.lock_names import Parameters, Template
from sqlalchemy_locks.integrations.problem import (
    BAD_NAME,
    FAILED,
    LOST,
    NOT_FOUND,
    UNKNOWN_OUTCOME,
    Kind,
    kind_of,
    problem,
)
from sqlalchemy_locks.integrations.starlette import LockProblem, answer

#: a name with the route's parameters in braces, or a dependency that gives the name
Name = str | Callable[..., Any]
#: when a lock ends: with the endpoint, or when the response is sent, and the background tasks are done
Scope = Literal["function", "request"]
#: makes the block of a request: of the locks, the names, and the idempotency key
Block = Callable[[AsyncLocks, list[str], Any], AbstractAsyncContextManager[Any]]

_HANDLERS = "starlette.exception_handlers"


class RouteLock:
    """One lock of one or more routes: what FastAPI calls for each request."""

    def __init__(
        self,
        names: Sequence[Name],
        block: Block,
        kinds: Iterable[Kind],
        scope: Scope,
        retry: Callable[[Kind], float | None],
        locks: AsyncLocks | Callable[..., Any],
        key: Callable[..., Any] | None = None,
        unless: Callable[..., Any] | None = None,
    ) -> None:
        if scope not in ("function", "request"):
            raise ValueError(f'scope is "function" or "request", not {scope!r}')
        self._names: list[Template | None] = []
        self._block, self._scope, self._retry = block, scope, retry
        self._locks: AsyncLocks | None = None
        self._routes: dict[int, tuple[Any, Parameters]] = {}
        asked: dict[str, Any] = {"connection": HTTPConnection}
        if unless is not None:
            asked["unless"] = Annotated[Any, Depends(unless)]
        if isinstance(locks, AsyncLocks):
            self._locks = locks
        else:
            asked["locks"] = Annotated[Any, Depends(locks)]
        if key is not None:
            asked["key"] = Annotated[Any, Depends(key)]
        for number, name in enumerate(names):
            if callable(name):
                asked[f"name_{number}"] = Annotated[Any, Depends(name)]
            self._names.append(None if callable(name) else Template(name))
        self.fields = [field for template in self._templates for field in template.fields]
        #: named after what a client gives
        self._free = bool(self.fields) or None in self._names
        bad = (BAD_NAME,) if self._free or key is not None else ()
        self.kinds = [kind for kind in (*kinds, *bad, LOST, UNKNOWN_OUTCOME) if self._free or kind is not NOT_FOUND]
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=of) for name, of in asked.items()]
        )

    async def __call__(self, *, connection: HTTPConnection, **given: Any) -> AsyncIterator[Any]:
        """Hold the lock while the endpoint works."""
        if given.get("unless"):
            yield None
            return
        route = connection.scope["route"]
        parameters = self._parameters(route, route.path_format) if self.fields else None
        try:
            names = self._named(parameters, connection, given)
            key = None if given.get("key") is None else valid_name(given["key"], "an idempotency key")
        except ValueError as error:
            raise self._problem(connection, BAD_NAME) from error
        block = self._block(self._locks or given["locks"], names, key)
        try:
            held = await block.__aenter__()
        except LockError as error:
            self._refuse(connection, error)
            raise
        try:
            yield held
        except BaseException as error:
            # whatever the endpoint raised is for the handlers that the app has for it
            if not await block.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            try:
                await block.__aexit__(None, None, None)
            except LockError as error:
                if self._scope == "function":  # else the response has been sent
                    self._refuse(connection, error)
                raise

    @property
    def _templates(self) -> list[Template]:
        return [template for template in self._names if template is not None]

    def check(self, route: Any) -> None:
        """Refuse what a route can't do.

        :raises ValueError: with what to do instead.
        """
        if self.fields:
            self._parameters(getattr(route, "original_route", route), route.path_format)
        if self._scope == "function" and _streams(route):
            raise ValueError(
                f"the route {route.path_format} streams its response, and its lock would end before that: give "
                'the lock scope="request", or use a lease'
            )

    def _parameters(self, route: Any, path: str) -> Parameters:
        known = self._routes.get(id(route))
        if known is None:
            parameters = Parameters(route.dependant)
            for template in self._templates:
                parameters.check(template, f"the route {path}")
            # kept with the route, so that no other one ever has its number
            known = self._routes[id(route)] = route, parameters
        return known[1]

    def _named(self, parameters: Parameters | None, connection: HTTPConnection, given: Mapping[str, Any]) -> list[str]:
        values = {} if parameters is None else parameters.values(self.fields, connection)
        return [
            valid_name(given[f"name_{number}"], "a lock's name") if template is None else template.fill(values)
            for number, template in enumerate(self._names)
        ]

    def _refuse(self, connection: HTTPConnection, error: LockError) -> None:
        kind = NOT_FOUND if self._free and isinstance(error, UnknownSemaphore) else kind_of(error)
        if kind is not FAILED:
            raise self._problem(connection, kind) from error

    def _problem(self, connection: HTTPConnection, kind: Kind) -> LockProblem:
        # A dependency can't register a handler with the app, and its HTTPException would be answered as any other:
        # with the same status and Retry-After, and another body.
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
    known = (response, returned, *_named_by(endpoint))
    return any(isinstance(one, type) and issubclass(one, StreamingResponse) for one in known)


def _named_by(endpoint: Any) -> Iterator[Any]:
    """What an endpoint's own code calls by name: few say what they return."""
    try:
        used = inspect.getclosurevars(inspect.unwrap(endpoint))
    except (TypeError, ValueError):
        return
    for one in (*used.nonlocals.values(), *used.globals.values()):
        yield one
        if inspect.ismodule(one):
            yield from (getattr(one, name, None) for name in used.unbound)

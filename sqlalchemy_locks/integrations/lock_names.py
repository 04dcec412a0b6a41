"""The names of locks, made of what a request has in it: ``"invoice:{invoice_id}"``, and the route's own parameters.

What is promised: a name is made of what the route makes of its parameter, and never of the raw text: ``/invoices/42``
and ``/invoices/042`` are one invoice to an endpoint that takes an ``int``, and so they are one lock. A template that
names something else is refused before the first request.

It relies on what FastAPI knows about a route: ``route.dependant`` and ``request_params_to_args``.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin
from uuid import UUID

from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from sqlalchemy_locks._validation import valid_name

#: what has one way to be written
_PLAIN = (str, int, UUID, date)
#: equal ones may be written differently
_NOT_PLAIN = (float, Decimal, datetime, time, timedelta, bytes, list, tuple, set, dict)
_KINDS = {
    "path_params": lambda connection: connection.path_params,
    "query_params": lambda connection: connection.query_params,
    "header_params": lambda connection: connection.headers,
    "cookie_params": lambda connection: connection.cookies,
}


class Template:
    """A name with fields in braces.

    :raises ValueError: :raises TypeError: for what can never be a name, or a field that is more than a name.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a lock's name is a str, with parameters in braces, or a function, not {text!r}")
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        for before, field, spec, conversion in string.Formatter().parse(text):
            if field is not None and (not field.isidentifier() or spec or conversion):
                raise ValueError(
                    f"{text!r}: what is in braces is the name of a parameter of the route; give a function for more"
                )
            self._parts.append((before, field))
        if not self.fields:
            self.fill({})

    @property
    def fields(self) -> list[str]:
        """The parameters that it names."""
        return [field for _, field in self._parts if field is not None]

    def fill(self, values: dict[str, str]) -> str:
        """The name.

        :raises ValueError: when it is none: too long, or with a NUL in it.
        """
        name = "".join(before + ("" if field is None else values[field]) for before, field in self._parts)
        return valid_name(name, "a lock's name")


class Parameters:
    """What the parameters of one route are called, and where they are."""

    def __init__(self, dependant: Dependant) -> None:
        self._found: dict[str, list[tuple[str, Any]]] = {}
        for one in every(dependant):
            for kind in _KINDS:
                for field in getattr(one, kind):
                    self._found.setdefault(field.name, []).append((kind, field))

    def check(self, template: Template, where: str) -> None:
        """Refuse a template that this route can't fill.

        :raises ValueError: with what to do instead.
        """
        for name in template.fields:
            found = self._found.get(name)
            if not found:
                known = ", ".join(sorted(self._found)) or "none"
                raise ValueError(
                    f"{where} has no parameter {name!r}, which the lock {template.text!r} is named after (it has: "
                    f"{known}). Declare it, as a parameter of the endpoint, or give a function that makes the name"
                )
            types = {field.field_info.annotation for _, field in found}
            if len(types) > 1:
                raise ValueError(
                    f"{where} declares {name!r} more than once, as different types, so that the lock "
                    f"{template.text!r} could have two names for one thing"
                )
            (annotation,) = types
            for type_ in _members(annotation):
                why = _unnamed(type_)
                if why is not None:
                    raise ValueError(
                        f"{where} has {name!r} as {type_.__name__}, which {why}, so that the lock {template.text!r} "
                        "could have two names for one thing, or none: give a function that makes the name"
                    )

    def values(self, fields: list[str], connection: HTTPConnection) -> dict[str, str]:
        """The parameters of a request, as they are written in a name.

        :raises RequestValidationError: where FastAPI would refuse them, which it does only when the lock is had.
        :raises ValueError: where one is absent.
        """
        written: dict[str, str] = {}
        errors: list[Any] = []
        for name in dict.fromkeys(fields):
            kind, field = self._found[name][0]
            values, wrong = request_params_to_args([field], _KINDS[kind](connection))
            errors += wrong
            if not wrong:
                written[name] = _written(name, values[name])
        if errors:
            raise RequestValidationError(errors)
        return written


def _members(annotation: Any) -> Iterator[type]:
    """The classes that a parameter can be of, those of a union each."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin is Union or origin is UnionType:
        for one in get_args(annotation):
            yield from _members(one)
    elif isinstance(origin or annotation, type):
        yield origin or annotation


def _unnamed(type_: type) -> str | None:
    """Why no name is made of it, if none is."""
    if issubclass(type_, BaseModel):
        return "is several parameters"
    several = issubclass(type_, _NOT_PLAIN) and not issubclass(type_, Enum)
    return "can be written in several ways" if several else None


def every(dependant: Dependant) -> Iterator[Dependant]:
    """A route's dependencies, and itself."""
    yield dependant
    for one in dependant.dependencies:
        yield from every(one)


def _written(name: str, value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        raise ValueError(f"the parameter {name!r}, which a lock is named after, was not given")
    if not isinstance(value, _PLAIN) or isinstance(value, datetime):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}, of which no name is made: give a function that makes it"
        )
    return str(value)

"""Names of locks from a request's parameters: ``"invoice:{invoice_id}"``.

A name is made of the parsed value, never of the raw text: to an endpoint with an ``int``, ``/invoices/42`` and
``/invoices/042`` are one invoice, and so they are one lock. A template with an unknown parameter is refused before the
first request.

This module relies on FastAPI's ``route.dependant`` and ``request_params_to_args``.
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

#: types whose equal values are written alike
_UNAMBIGUOUS = (str, int, UUID, date)
#: types whose equal values may be written differently
_AMBIGUOUS = (float, Decimal, datetime, time, timedelta, bytes, list, tuple, set, dict)
_SOURCES = {
    "path_params": lambda connection: connection.path_params,
    "query_params": lambda connection: connection.query_params,
    "header_params": lambda connection: connection.headers,
    "cookie_params": lambda connection: connection.cookies,
}


class Template:
    """A name with fields in braces.

    :raises ValueError: :raises TypeError: for text that can never be a name, or a field that is no plain identifier.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a lock's name is a str, with parameters in braces, or a function, not {text!r}")
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        for before, field, spec, conversion in string.Formatter().parse(text):
            if field is not None and (not field.isidentifier() or spec or conversion):
                raise ValueError(
                    f"{text!r}: braces contain the name of a parameter of the route; give a function for anything else"
                )
            self._parts.append((before, field))
        if not self.fields:
            self.fill({})

    @property
    def fields(self) -> list[str]:
        """The names of its parameters."""
        return [field for _, field in self._parts if field is not None]

    def fill(self, values: dict[str, str]) -> str:
        """Return the name.

        :raises ValueError: when it is no valid name: too long, or with a NUL in it.
        """
        name = "".join(before + ("" if field is None else values[field]) for before, field in self._parts)
        return valid_name(name, "a lock's name")


class Parameters:
    """The parameters of one route by name, and where each is in a request."""

    def __init__(self, dependant: Dependant) -> None:
        self._found: dict[str, list[tuple[str, Any]]] = {}
        for one in all_dependants(dependant):
            for source in _SOURCES:
                for field in getattr(one, source):
                    self._found.setdefault(field.name, []).append((source, field))

    def check(self, template: Template, where: str) -> None:
        """Refuse a template that this route can't fill.

        :raises ValueError: with what to do instead.
        """
        for name in template.fields:
            found = self._found.get(name)
            if not found:
                known = ", ".join(sorted(self._found)) or "none"
                raise ValueError(
                    f"{where} has no parameter {name!r} for the lock {template.text!r} (it has: {known}). Declare it "
                    "as a parameter of the endpoint, or give a function that makes the name"
                )
            types = {field.field_info.annotation for _, field in found}
            if len(types) > 1:
                raise ValueError(
                    f"{where} declares {name!r} more than once, as different types, so that the lock "
                    f"{template.text!r} could have two names for one thing"
                )
            (annotation,) = types
            for type_ in _members(annotation):
                why = _why_ambiguous(type_)
                if why is not None:
                    raise ValueError(
                        f"{where} has {name!r} as {type_.__name__}, which {why}, so that the lock {template.text!r} "
                        "could have two names for one thing, or none: give a function that makes the name"
                    )

    def values(self, fields: list[str], connection: HTTPConnection) -> dict[str, str]:
        """Return the parameters of a request as text for a name.

        :raises RequestValidationError: where FastAPI would refuse them, which happens only after the lock is acquired.
        :raises ValueError: for a missing parameter.
        """
        texts: dict[str, str] = {}
        errors: list[Any] = []
        for name in dict.fromkeys(fields):
            source, field = self._found[name][0]
            values, invalid = request_params_to_args([field], _SOURCES[source](connection))
            errors += invalid
            if not invalid:
                texts[name] = _text(name, values[name])
        if errors:
            raise RequestValidationError(errors)
        return texts


def _members(annotation: Any) -> Iterator[type]:
    """Yield the classes that a parameter can have, each member of a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin is Union or origin is UnionType:
        for one in get_args(annotation):
            yield from _members(one)
    elif isinstance(origin or annotation, type):
        yield origin or annotation


def _why_ambiguous(type_: type) -> str | None:
    """Return why no name can be made of values of a type, or ``None``."""
    if issubclass(type_, BaseModel):
        return "is several parameters"
    ambiguous = issubclass(type_, _AMBIGUOUS) and not issubclass(type_, Enum)
    return "can be written in several ways" if ambiguous else None


def all_dependants(dependant: Dependant) -> Iterator[Dependant]:
    """Yield a route's dependant, and those of its dependencies at any depth."""
    yield dependant
    for one in dependant.dependencies:
        yield from all_dependants(one)


def _text(name: str, value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        raise ValueError(f"the parameter {name!r}, which is part of a lock's name, is missing")
    if not isinstance(value, _UNAMBIGUOUS) or isinstance(value, datetime):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}, which can't be part of a name: give a function that makes the name"
        )
    return str(value)

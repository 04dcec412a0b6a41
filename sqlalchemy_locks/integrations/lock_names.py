"""Names of locks from a request's path: ``"invoice:{invoice_id}"``.

A name is made of the parsed value, never of the raw text: to an endpoint with an ``int``, ``/invoices/42`` and
``/invoices/042`` are one invoice, and so they are one lock.

This module relies on FastAPI's ``route.dependant`` and ``request_params_to_args``.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from enum import Enum
from typing import Any
from uuid import UUID

from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from starlette.requests import HTTPConnection

from sqlalchemy_locks._validation import valid_name

#: types whose equal values are written alike
_UNAMBIGUOUS = (str, int, UUID, date)


class Template:
    """A name with fields in braces.

    :raises ValueError: :raises TypeError: for text that can never be a name, or a field that is no plain identifier.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a lock's name is a str, with parameters in braces, or a function, not {text!r}")
        self._parts: list[tuple[str, str | None]] = []
        for before, field, spec, conversion in string.Formatter().parse(text):
            if field is not None and (not field.isidentifier() or spec or conversion):
                raise ValueError(
                    f"{text!r}: braces contain the name of a path parameter; give a function for anything else"
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


def path_values(dependant: Dependant, names: Iterable[str], connection: HTTPConnection) -> dict[str, str]:
    """Return path parameters of a request as text for a name.

    :raises RequestValidationError: where FastAPI would refuse them, which happens only after the lock is acquired.
    :raises TypeError: for a parameter that could give one thing two names: its raw text, when the route doesn't declare
        it, or a value that may be written in several ways.
    """
    fields: dict[str, Any] = {}
    for one in _dependants(dependant):
        for field in one.path_params:
            fields.setdefault(field.name, field)
    texts = {}
    for name in names:
        if name not in fields:
            raise TypeError(
                f"the route {dependant.path} has no path parameter {name!r} for the name of its lock: declare it in "
                "the endpoint, or give a function that makes the name"
            )
        values, errors = request_params_to_args([fields[name]], connection.path_params)
        if errors:
            raise RequestValidationError(errors)
        value = values[name].value if isinstance(values[name], Enum) else values[name]
        if not isinstance(value, _UNAMBIGUOUS) or isinstance(value, datetime):
            raise TypeError(
                f"{name!r} is a {type(value).__name__}, which can be written in several ways, so that a lock could "
                "have two names for one thing: give a function that makes the name"
            )
        texts[name] = str(value)
    return texts


def _dependants(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for one in dependant.dependencies:
        yield from _dependants(one)

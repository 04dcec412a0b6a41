"""The server's clock, read fresh: one element, compiled per engine. No other clock decides anything here.

``now()`` and its like are the transaction's or the statement's start, which a wait has made old.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import BigInteger, DateTime
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


class Instant(DateTime):
    """An instant to the microsecond, of the server's clock; MySQL's and MariaDB's plain DATETIME has whole seconds."""

    def __init__(self) -> None:
        super().__init__(timezone=True)


class Now(FunctionElement[datetime]):
    """This instant, in UTC, by the server."""

    type = Instant()
    inherit_cache = True


class Fresh(FunctionElement[datetime]):
    """This instant, in UTC, by the server; fresh even after a wait inside the statement, where the engine has it so.

    On MySQL and MariaDB it is. On PostgreSQL it is read before a row is waited for, and again only if the row has
    changed: whoever must be sure locks the row first, in a CTE. SQLite's one wait is at the statement's beginning.
    """

    type = Instant()
    inherit_cache = True


class Epoch(FunctionElement[int]):
    """This instant as whole seconds since 1970, by the server; fresh even after a wait inside the statement."""

    type = BigInteger()
    inherit_cache = True


class Began(FunctionElement[datetime]):
    """When this statement began, by the server: for conditions.

    The same for every row, so that an index can be asked; where the statement waits for nobody, as fresh as ``Now``.
    """

    type = Instant()
    inherit_cache = True


class Ago(FunctionElement[datetime]):
    """So many seconds before ``Began``; the argument may have a fraction."""

    type = Instant()
    inherit_cache = True


class Elapsed(FunctionElement[int]):
    """Whole seconds from an instant to ``Began``; less than 0 when it is yet to come."""

    type = BigInteger()
    inherit_cache = True


class Later(FunctionElement[datetime]):
    """An instant and some seconds, which may be fractions or less than none; arguments are the two."""

    type = Instant()
    inherit_cache = True


def utc(instant: datetime | None) -> datetime | None:
    """An instant of the server's, whatever the driver makes of it."""
    if instant is None:
        return None
    return instant.replace(tzinfo=timezone.utc) if instant.tzinfo is None else instant.astimezone(timezone.utc)


class UTC(TypeDecorator[datetime]):
    """An instant with its zone, whatever the driver makes of it."""

    impl = Instant
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        return utc(value)

"""The server's clock: elements that each engine compiles. No other clock decides anything in this library.

It isn't the engine's ``now()``: that is the start of the transaction or statement, which may be long ago after a wait.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import BigInteger, DateTime
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


class Instant(DateTime):
    """A timestamp with microseconds, of the server's clock; plain DATETIME of MySQL and MariaDB has whole seconds."""

    def __init__(self) -> None:
        super().__init__(timezone=True)


class Now(FunctionElement[datetime]):
    """The current time in UTC, by the server."""

    type = Instant()
    inherit_cache = True


class NowAfterWait(FunctionElement[datetime]):
    """The current time in UTC, by the server; read after a wait inside the statement, where the engine can.

    MySQL and MariaDB can. PostgreSQL reads it before it waits for a row, and again only if the row has changed: to be
    sure, lock the row first, in a CTE. SQLite waits only at the statement's beginning.
    """

    type = Instant()
    inherit_cache = True


class Epoch(FunctionElement[int]):
    """The current time in whole seconds since 1970, by the server; read after a wait inside the statement."""

    type = BigInteger()
    inherit_cache = True


class StatementStart(FunctionElement[datetime]):
    """The start of this statement, by the server's clock: for conditions.

    It is the same for every row, so that an index can be used.
    """

    type = Instant()
    inherit_cache = True


class SecondsAgo(FunctionElement[datetime]):
    """A number of seconds before ``StatementStart``; the argument may have a fraction."""

    type = Instant()
    inherit_cache = True


class Elapsed(FunctionElement[int]):
    """Whole seconds from an instant to ``StatementStart``; negative for an instant in the future."""

    type = BigInteger()
    inherit_cache = True


class PlusSeconds(FunctionElement[datetime]):
    """An instant plus a number of seconds, its two arguments; the number may be fractional or negative."""

    type = Instant()
    inherit_cache = True


def utc(instant: datetime | None) -> datetime | None:
    """Return a timestamp of the server with its zone, UTC, which some drivers leave out."""
    if instant is None:
        return None
    return instant.replace(tzinfo=timezone.utc) if instant.tzinfo is None else instant.astimezone(timezone.utc)


class UTC(TypeDecorator[datetime]):
    """A timestamp that is loaded with its zone, UTC, by every driver."""

    impl = Instant
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        return utc(value)

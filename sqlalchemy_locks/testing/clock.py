"""A clock to advance: the instants in the tables are moved back, as if time had passed."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from sqlalchemy import Connection, DateTime, Engine, Table, inspect, select, update
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import Instant

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

E = TypeVar("E", "Engine", "AsyncEngine")

_OF_JOBS = ("run_at", "heartbeat_at", "created_at", "started_at", "completed_at", "failed_at")


class Clock(Generic[E]):
    """The server's clock, as far as this library's tables depend on it.

    A test can't set the clock of a server. Leases, timeouts, jobs and tasks end when their stored instants are old
    enough, so :meth:`advance` moves these instants back.

    :param engine: the ``Engine`` or ``AsyncEngine`` whose tables are changed; its options select their schema or
        prefix.
    :param entities: tables of jobs of your own, as mapped classes or ``Table``. Of these, the columns that
        ``sl.JobColumns`` has are moved.

    >>> clock = Clock(engine)
    >>> grant = locks.acquire({"network": 1}, ttl=60)
    >>> clock.advance(61)
    >>> locks.renew(grant)
    False
    """

    def __init__(self, engine: E, *entities: Any) -> None:
        # of an AsyncEngine, the one inside it
        inner: object = getattr(engine, "sync_engine", engine)
        if not isinstance(inner, Engine):
            raise TypeError(f"Clock takes an Engine or an AsyncEngine, not {engine!r}")
        self._engine, self._awaited = inner, inner is not engine
        self._own = [entity if isinstance(entity, Table) else inspect(entity).local_table for entity in entities]

    @overload
    def advance(self: Clock[Engine], seconds: float | timedelta) -> None: ...
    @overload
    def advance(self: Clock[AsyncEngine], seconds: float | timedelta) -> Coroutine[Any, Any, None]: ...
    def advance(self, seconds: float | timedelta) -> Any:
        """Let time pass in the database; await it with an ``AsyncEngine``.

        :param seconds: how much, in seconds or as a ``timedelta``.

        This waits for other transactions that have changed these tables and are still open. ``grant.lost`` goes by the
        clock of this process, which isn't moved; ``grant.check()`` asks the database.

        >>> Clock(engine).advance(3600)
        """
        period = bounded_seconds(seconds, "seconds")
        return greenlet_spawn(self._advance, period) if self._awaited else self._advance(period)

    def _advance(self, period: float) -> None:
        context = build_context(self._engine.dialect, self._engine.get_execution_options())
        shipped = context.tables.job.metadata.sorted_tables
        with self._engine.begin() as connection:
            for table in shipped:
                # PostgreSQL has a view of this name, and nothing depends on the age of a key
                if table is not context.tables.locked_keys:
                    _move(connection, table, period, epoch=table is context.tables.task_timeout)
            for table in self._own:
                _move(connection, table, period, epoch=False)


def _move(connection: Connection, table: Table, period: float, *, epoch: bool) -> None:
    """Move every instant of a table back.

    :param epoch: its column ``ts`` has seconds since 1970.
    """
    instants = [
        column
        for column in table.columns
        if isinstance(column.type, Instant) or (isinstance(column.type, DateTime) and column.name in _OF_JOBS)
    ]
    columns = [*instants, table.c.ts] if epoch else instants
    if not columns:
        return
    key = list(table.primary_key)
    for row in connection.execute(select(*key, *columns)).all():
        values = dict(zip(columns, row[len(key) :], strict=True))
        past = {
            column: value - (timedelta(seconds=period) if column in instants else period)
            for column, value in values.items()
            if value is not None
        }
        if past:
            where = [column == value for column, value in zip(key, row, strict=False)]
            connection.execute(update(table).where(*where).values(past))

"""Timeout: a lock that is acquired at most once per period, and needs no release.

An acquisition is ``UPDATE task SET ts = now WHERE id = ... AND ts + timeout < now``. With ``windowed=True`` time is
divided into windows, and the first UPDATE of a window succeeds. Its condition is ``floor(ts / timeout) < floor(now /
timeout)``: ``ts`` is before the start of the current window (``windows.py``).

Guarantee: at most one acquisition per period (elapsed), or per window (windowed; two acquisitions on either side of a
boundary may be close together), by the server's clock. The clock is read after the row is locked, not when the
statement starts waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Integer, SmallInteger, Update, and_, bindparam, cast, null, or_, select, update

from sqlalchemy_locks._utc_offsets import zone
from sqlalchemy_locks._validation import period_seconds, seconds_since_1970
from sqlalchemy_locks.conditional.listing import Listing, labelled
from sqlalchemy_locks.conditional.windows import in_earlier_window, zone_parameters
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.conditional_update import ConditionalAcquire
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, RowsOperation
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping, param_name, role_param
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, shaped
from sqlalchemy_locks.sql.clock import Epoch

_ROLES = ("queue", "id", "ts", "timeout", "token", "fence", "retries")
_EVERY, _NOW = (bindparam(param_name(name), type_=BigInteger()) for name in ("every", "now"))

Clock = Callable[[], "float | datetime"]


class Timeout:
    """A lock that is free again when its period has ended.

    :param entity: a mapped class or ``Table`` of your own; without one, the shipped table ``lock.task_timeout``.
    :param every: the period, in whole seconds or as a ``timedelta``; without it, each row's own ``timeout`` column.
    :param windowed: divide time into windows of that length, and allow one acquisition in each.
    :param tz: the name of a time zone, for windows of local time (``every=86400``: from midnight to midnight there).
    :param clock: for tests: returns the instant (seconds since 1970, or an aware ``datetime``) instead of the server.
    :param id: the column that names the timeout; its values must be unique (in one ``queue``).
    :param ts: its column for the last acquisition, in seconds since 1970. ``NULL`` is never.
    :param timeout: its column for the row's own period, in seconds.
    :param queue: :param retries: :param fence: :param token: as for :class:`Mutex`.
    :raises TypeError: :raises ValueError: for anything but a column of the class's own table, a period that is not
        whole seconds, an unknown zone.

    >>> hourly = sl.Timeout(every=3600, windowed=True)
    >>> session.scalar(hourly.create("report"))
    >>> session.scalar(hourly.acquire("report"))
    True
    """

    def __init__(
        self,
        entity: Any = None,
        *,
        every: float | timedelta | None = None,
        windowed: bool = False,
        tz: str | None = None,
        clock: Clock | None = None,
        id: Any = None,
        ts: Any = None,
        timeout: Any = None,
        queue: Any = None,
        retries: Any = None,
        fence: Any = None,
        token: Any = None,
    ) -> None:
        if tz is not None and not windowed:
            raise ValueError("Timeout: tz is for windows of local time, so pass windowed=True")
        if clock is not None and not callable(clock):
            raise TypeError(f"Timeout: clock is a function that returns the instant, not {clock!r}")
        self._every = None if every is None else period_seconds(every, "every")
        variant = _Variant(every is not None, bool(windowed), None if tz is None else zone(tz), clock)
        columns = {
            "queue": queue,
            "id": id,
            "ts": ts,
            "timeout": timeout,
            "token": token,
            "fence": fence,
            "retries": retries,
        }
        if entity is None and not any(column is not None for column in columns.values()):
            self._mapping = _shipped()
            self._impls = _shipped_impls(variant) if clock is None else _TimeoutImpls(self._mapping, variant)
            return
        if entity is not None and (id is None or ts is None):
            raise TypeError("Timeout needs id= and ts=, columns of the given class or table")
        self._mapping = RoleMapping("Timeout", lambda tables: tables.task_timeout, _ROLES, entity, columns)
        self._impls = _TimeoutImpls(self._mapping, variant)
        if every is None:
            self._mapping.require("timeout", "a period per row")
        for role in ("ts", "timeout"):
            self._mapping.require_type(role, (Integer,), "whole seconds", but=SmallInteger)

    @shaped(INT_ROW)
    def create(
        self, *ids: Any, queue: Any = None, retries: int | None = None, every: float | timedelta | None = None
    ) -> Operation[Any]:
        """Create timeouts, each free immediately. Ids that exist are left unchanged.

        :param retries: how many acquisitions each allows; ``None``: the column's default (the shipped table:
            unlimited).
        :param every: the period to store, in whole seconds or as a ``timedelta``; this ``Timeout``'s if not given.
        :return: how many were created.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        """
        period = self._every if every is None else period_seconds(every, "every")
        if period is None and self._mapping.has("timeout"):
            raise ValueError("Timeout: pass every= here or to Timeout(): each row stores its period")
        values = row_admin.ids(self._mapping, "timeout.create", ids, queue) | row_admin.retries(self._mapping, retries)
        if period is not None:
            values[_EVERY.key] = period
        return Operation(self._impls.create[retries is not None], values)

    @shaped(BOOL_ROW)
    def acquire(self, id: Any, *, queue: Any = None, nowait: bool = False) -> Operation[Any]:
        """Acquire a timeout if its period has ended and it has a retry left.

        :param nowait: return ``False`` if another transaction has locked the row. Otherwise wait for that transaction
            to end, for at most the ``locks_wait`` option's seconds.
        :return: ``True`` if it was acquired, ``False`` if its period isn't over or it has no retry left.
        :raises UnknownTask: if it was never created.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> session.scalar(daily.acquire("report")), session.scalar(daily.acquire("report"))
        (True, False)
        """
        return Operation(self._impls.acquire[bool(nowait)], self._values(id, queue))

    @shaped(INT_ROW)
    def acquire_token(self, id: Any, *, queue: Any = None, nowait: bool = False) -> Operation[Any]:
        """Acquire a timeout as :meth:`acquire` does, and return a fencing token.

        :return: a number greater than any earlier token of this timeout, or ``None`` if it was not acquired.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> session.scalar(daily.acquire_token("report"))
        1
        """
        self._mapping.require("fence", "a fencing token")
        return Operation(self._impls.acquire_token[bool(nowait)], self._values(id, queue))

    def listed(self, limit: int = 1000, *, queue: Any = None) -> RowsOperation[Any]:
        """List timeouts for monitoring: rows of ``queue, id, every, free_in, retries``.

        :param limit: how many at most.
        :param queue: only those of this queue.

        ``every`` is the row's own period in seconds; ``free_in`` is the number of seconds until it ends by the
        server's clock, negative when it has ended. A window (``windowed=True``) may end sooner. A value is
        ``None`` where there is no such column.

        >>> session.execute(sl.Timeout().listed()).all()
        """
        values = {} if queue is None else self._mapping.queue(queue)
        return RowsOperation(self._impls.listed[queue is not None], row_admin.limit(limit) | values)

    @shaped(BOOL_ROW)
    def set_retries(self, id: Any, retries: int | None, *, queue: Any = None) -> Operation[Any]:
        """Set how many acquisitions are left.

        :param retries: their number; ``None``: unlimited.
        :return: ``True``.
        :raises UnknownTask: if it was never created.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> session.scalar(daily.set_retries("report", 3))
        True
        """
        number = row_admin.retries(self._mapping, retries, required=True)
        return Operation(self._impls.set_retries, self._mapping.identity(id, queue) | number)

    def _values(self, id: Any, queue: Any) -> dict[str, Any]:
        return self._mapping.identity(id, queue) | ({} if self._every is None else {_EVERY.key: self._every})


class _Variant(NamedTuple):
    """The arguments of a ``Timeout`` that change its statements."""

    #: the call gives the period; otherwise the row has it
    gives_period: bool
    windowed: bool
    zone: Any
    clock: Clock | None


class _TimeoutAcquire(ConditionalAcquire):
    def __init__(
        self,
        mapping: RoleMapping,
        name: str,
        variant: _Variant,
        *,
        returns_token: bool,
        patient: _TimeoutAcquire | None = None,
    ) -> None:
        super().__init__(mapping, name, returns_token=returns_token, patient=patient)
        self.variant = variant
        self._now: Any = Epoch() if variant.clock is None else _NOW

    def is_free(self, columns: RoleColumns, now: Any = None) -> list[Any]:
        now = self._now if now is None else now
        ts, every = columns["ts"], _EVERY if self.variant.gives_period else columns["timeout"]
        if self.variant.windowed:
            free = in_earlier_window(ts, now, every, civil=self.variant.zone is not None)
        else:
            free = _as_bigint(ts) + every < now
        return [or_(ts.is_(None), free) if ts.nullable else free]

    def update_of(self, context: BuildContext, columns: RoleColumns) -> Update:
        if not context.backend.writable_ctes:
            return super().update_of(context, columns)
        # Lock the row first and read the clock afterwards, in one statement: an UPDATE that waits for the row would
        # store the instant at which it started waiting.
        condition = and_(*self.mapping.row_condition(columns), *self.condition(columns))
        due = select(*columns.table.primary_key).where(condition)
        due_cte = due.with_for_update(skip_locked=self.patient is not None, key_share=True).cte("locks_due")
        due_cte = due_cte.prefix_with("MATERIALIZED")
        clock = select(due_cte, self._now.label("locks_now")).cte("locks_clock").prefix_with("MATERIALIZED")
        same_row = [column == clock.c[column.key] for column in columns.table.primary_key]
        now = clock.c.locks_now
        condition = and_(*same_row, *self.is_free(columns, now), *self.may_acquire(columns))
        return (
            update(columns.table)
            .where(condition)
            .values({columns["ts"]: now} | self.acquisition_changes(columns) | self.mapping.version_bump())
        )

    def changes(self, columns: RoleColumns) -> dict[Any, Any]:
        return {columns["ts"]: self._now} | self.acquisition_changes(columns)

    def call_values(self, execution: Execution) -> dict[str, Any]:
        values, instant = super().call_values(execution), time.time()
        if self.variant.clock is not None:
            values[_NOW.key] = instant = seconds_since_1970(self.variant.clock())
        if self.variant.zone is not None:
            values |= zone_parameters(self.variant.zone, instant)
        return values


class _TimeoutImpls:
    """The operations on the timeouts of one table, built once; by ``nowait``, or by whether an argument is given."""

    def __init__(self, mapping: RoleMapping, variant: _Variant) -> None:
        self.acquire = _TimeoutAcquire.variants(mapping, "timeout.acquire", variant, returns_token=False)
        self.acquire_token = _TimeoutAcquire.variants(mapping, "timeout.acquire_token", variant, returns_token=True)
        self.create = row_admin.CreateRows.variants(mapping, "timeout.create", _initial)
        self.set_retries = row_admin.SetRetries(mapping, "timeout.set_retries")
        self.listed = {
            one_queue: Listing(
                mapping,
                "timeout.listed",
                select=_listed_columns,
                where=_in_queue if one_queue else lambda columns: [],
                order_by=lambda columns: [columns[role] for role in ("queue", "id") if role in columns],
            )
            for one_queue in (False, True)
        }


def _in_queue(columns: RoleColumns) -> list[Any]:
    return [columns["queue"] == role_param(columns["queue"], "queue")]


def _listed_columns(columns: RoleColumns) -> list[Any]:
    every: Any = null()
    free_in: Any = null()
    if "timeout" in columns:
        every = columns["timeout"]
        # signed: MySQL's clock is unsigned, and a negative unsigned difference is an error
        free_in = _as_bigint(columns["ts"]) + every - cast(Epoch(), BigInteger())
    return [
        labelled(columns, "queue"),
        labelled(columns, "id"),
        every.label("every"),
        free_in.label("free_in"),
        labelled(columns, "retries"),
    ]


def _initial(columns: RoleColumns) -> dict[str, Any]:
    return {"ts": 0, "timeout": _EVERY}


def _as_bigint(column: Any) -> Any:
    """Return the column as 64 bits, since the sum of two integers of 32 bits may need more."""
    return column if isinstance(column.type, BigInteger) else cast(column, BigInteger())


@cache
def _shipped() -> RoleMapping:
    return RoleMapping("Timeout", lambda tables: tables.task_timeout, _ROLES)


@cache
def _shipped_impls(variant: _Variant) -> _TimeoutImpls:
    return _TimeoutImpls(_shipped(), variant)

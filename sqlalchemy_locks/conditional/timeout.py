"""Timeout: a lock that frees itself, once a period.

The pattern: ``UPDATE task SET ts = now WHERE id = ... AND ts + timeout < now``; nobody has to release anything. In
its other form time is cut into windows, and the first write of a window wins:
``floor(ts / timeout) < floor(now / timeout)``, which is to say that ``ts`` is from before the window's start.

What is promised: at most one acquisition in a period (elapsed), or in a window (windowed; two runs may then lie
close together, either side of a boundary), by the server's clock, read when the row is locked and not when the
statement began to wait for it.
"""

from __future__ import annotations

import math
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Integer, Numeric, bindparam, cast, literal, null, select

from sqlalchemy_locks import _timezones as zones
from sqlalchemy_locks._validation import seconds
from sqlalchemy_locks.conditional.batch import BatchAcquire
from sqlalchemy_locks.conditional.listing import Listing, told
from sqlalchemy_locks.conditional.timeout_impl import Clock, TimeoutAcquire, TimeoutGiveBack, TimeoutKind, wide
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.conditional_update import Answer
from sqlalchemy_locks.core.operation import Operation, RowsOperation, shaped, shaped_rows
from sqlalchemy_locks.core.roles import ID, RoleColumns, RoleMapping, nonce_of, param_name, role_param
from sqlalchemy_locks.sql.clock import Epoch

_ROLES = ("queue", "id", "ts", "timeout", "token", "fence", "retries")


class Timeout:
    """A lock that is free again when its period is over.

    :param entity: a mapped class or ``Table`` of your own; without one, the shipped table ``lock.task_timeout``.
    :param every: the period, in whole seconds or as a ``timedelta``; without it, each row's own ``timeout`` column.
    :param windowed: cut time into windows of that length, and allow one acquisition in each.
    :param tz: for windows of civil time (``every=86400``: from midnight to midnight there), the name of a zone.
    :param clock: for tests: gives the instant (seconds since 1970, or an aware ``datetime``) instead of the server.
    :param id: the column that names the timeout; its values must be unique (in one ``queue``).
    :param ts: its column for when it was last acquired, in seconds since 1970. ``NULL`` is never.
    :param timeout: its column for the row's own period, in seconds.
    :param queue: :param retries: :param fence: :param token: as for :class:`Mutex`.
    :raises TypeError: :raises ValueError: for what is not a column of that class's own table, a period that is not
        whole seconds, an unknown zone.

    The patterns: "Distributed locks: SQL" and "Distributed locks: NoSQL", Timeout.

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
            raise ValueError("Timeout: tz is for windows of civil time, so say windowed=True")
        if clock is not None and not callable(clock):
            raise TypeError(f"Timeout: clock is a function that gives the instant, not {clock!r}")
        self._every = None if every is None else _period(every)
        kind = TimeoutKind(every is not None, bool(windowed), None if tz is None else zones.zone(tz), clock)
        given = {
            "queue": queue,
            "id": id,
            "ts": ts,
            "timeout": timeout,
            "token": token,
            "fence": fence,
            "retries": retries,
        }
        if entity is None and not any(column is not None for column in given.values()):
            self._rows, self._bodies = (
                _shipped(),
                _shipped_bodies(kind) if clock is None else _TimeoutImpls(_shipped(), kind),
            )
            return
        if entity is not None and (id is None or ts is None):
            raise TypeError("Timeout needs id= and ts=, the columns of the class or table that it was given")
        self._rows = RoleMapping("Timeout", lambda tables: tables.task_timeout, _ROLES, entity, given)
        self._bodies = _TimeoutImpls(self._rows, kind)
        if every is None:
            self._rows.require("timeout", "a period of each row's own")
        for role in ("ts", "timeout"):
            self._rows.of_type(role, (Integer, Numeric), "seconds since 1970, or for a period")
            self._rows.of_whole_seconds(role)

    @shaped(select(literal(1)))
    def create(
        self, *ids: Any, queue: Any = None, retries: int | None = None, every: float | timedelta | None = None
    ) -> Operation[Any]:
        """Insert the absent ones of some timeouts, free at once.

        :param retries: how many acquisitions they allow; ``None`` leaves that to the column's default (the shipped
            table: as many as you like).
        :param every: the period to store in the row, in whole seconds; that of this ``Timeout`` when not given.
        :return: how many were absent.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        """
        period = self._every if every is None else _period(every)
        if period is None and self._rows.has("timeout"):
            raise ValueError("Timeout: say every=, here or where the Timeout is made: the row keeps its period")
        values = row_admin.ids(self._rows, "timeout.create", ids, queue) | row_admin.retries(self._rows, retries)
        return Operation(
            self._bodies.create[retries is not None], values | ({} if period is None else {param_name("every"): period})
        )

    @shaped(select(literal(True)))
    def acquire(self, id: Any, *, queue: Any = None, nowait: bool = False) -> Operation[Any]:
        """Take a timeout, if its period is over and it has a retry left.

        :param nowait: don't wait for a transaction that is changing the row: ``False`` then. Without it, in your own
            session, one waits for that transaction's end (the option ``locks_wait`` bounds that, in seconds).
        :return: ``True`` when it is yours, ``False`` when its period isn't over, or no retry is left.
        :raises UnknownTask: when it was never created.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> session.scalar(daily.acquire("report")), session.scalar(daily.acquire("report"))
        (True, False)
        """
        return Operation(self._bodies.acquire["whether", bool(nowait)], self._values(id, queue))

    @shaped(select(literal(1)))
    def acquire_token(self, id: Any, *, queue: Any = None, nowait: bool = False) -> Operation[Any]:
        """As :meth:`acquire`, for a fencing token: greater than any that this timeout gave before, or ``None``.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> session.scalar(daily.acquire_token("report"))
        1
        """
        self._rows.require("fence", "a fencing token")
        return Operation(self._bodies.acquire["token", bool(nowait)], self._values(id, queue))

    def _give_back(self, id: Any, queue: Any, nonce: str, due_in: float) -> Operation[Any]:
        """Have what the acquisition with this nonce took, and nobody since, due again in so many seconds."""
        whose = {param_name("whose"): nonce_of(self._rows, nonce), param_name("due"): math.ceil(due_in)}
        return Operation(self._bodies.give_back, self._values(id, queue) | whose)

    @shaped_rows(select(ID))
    def capture(self, limit: int, *, queue: Any = None) -> RowsOperation[Any]:
        """Take several timeouts at once, whichever are free, passing over those that others are changing.

        :return: their ids in order, one a row: ``session.scalars(timeout.capture(3)).all()``.

        MySQL and MariaDB lock every row they pass unless the transaction is READ COMMITTED, and refuse in autocommit.
        ``Locks`` sees to both: ``locks.run(...)`` gives the list of ids.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> [row.id for row in session.execute(daily.capture(5)).all()]
        ['report']
        """
        values = self._rows.queue(queue) | row_admin.limit(limit) | self._override()
        return RowsOperation(self._bodies.capture, values)

    def listed(self, limit: int = 1000, *, queue: Any = None) -> RowsOperation[Any]:
        """All timeouts, for people: rows of ``queue, id, every, free_in, retries``.

        :param limit: how many at most.
        :param queue: only those of this queue.

        ``every`` is the row's own period in seconds; ``free_in`` is in how many seconds it is over, by the server's
        clock, less than 0 when it is over already. A window (``windowed=True``) may end sooner. ``None`` stands where
        there is no such column.

        >>> session.execute(sl.Timeout().listed()).all()
        """
        chosen = {} if queue is None else self._rows.queue(queue)
        return RowsOperation(self._bodies.listed[queue is not None], row_admin.limit(limit) | chosen)

    @shaped(select(literal(True)))
    def set_retries(self, id: Any, retries: int | None, *, queue: Any = None) -> Operation[Any]:
        """Say how many acquisitions are left; ``None``: as many as you like.

        :return: ``True``. :raises UnknownTask: when it was never created.

        >>> daily = sl.Timeout(every=86400)
        >>> session.scalar(daily.create("report"))
        1
        >>> session.scalar(daily.set_retries("report", 3))
        True
        """
        left = row_admin.retries(self._rows, retries, required=True)
        return Operation(self._bodies.set_retries, self._rows.identity(id, queue) | left)

    def _values(self, id: Any, queue: Any) -> dict[str, Any]:
        return self._rows.identity(id, queue) | self._override()

    def _override(self) -> dict[str, Any]:
        return {} if self._every is None else {param_name("every"): self._every}


def _period(every: float | timedelta) -> int:
    period = seconds(every, "every", zero=False)
    if period > 2**53:
        raise ValueError(f"every is longer than any clock runs: {every!r}")
    if period != int(period):
        raise ValueError(f"every must be whole seconds, since that is what ts counts, not {every!r}")
    return int(period)


class _TimeoutImpls:
    """The statements of the timeouts of some rows, built once."""

    def __init__(self, rows: RoleMapping, kind: TimeoutKind) -> None:
        self.acquire: dict[tuple[Answer, bool], TimeoutAcquire] = {}
        names: tuple[tuple[Answer, str], ...] = (("whether", "timeout.acquire"), ("token", "timeout.acquire_token"))
        for answer, name in names:
            patient = TimeoutAcquire(rows, name, answer, kind)
            self.acquire[answer, False] = patient
            self.acquire[answer, True] = TimeoutAcquire(rows, name, answer, kind, patient)
        self.capture = BatchAcquire("timeout.capture", self.acquire["whether", False])
        self.create = {
            retries: row_admin.CreateRows(rows, "timeout.create", _initial, retries=retries)
            for retries in (False, True)
        }
        self.give_back = TimeoutGiveBack(rows)
        self.set_retries = row_admin.SetRetries(rows, "timeout.set_retries")
        self.listed = {
            chosen: Listing(
                rows,
                "timeout.listed",
                columns=_told,
                conditions=_of_queue if chosen else lambda at: [],
                order=lambda at: [at[role] for role in ("queue", "id") if role in at],
            )
            for chosen in (False, True)
        }


def _of_queue(at: RoleColumns) -> list[Any]:
    return [at["queue"] == role_param(at["queue"], "queue")]


def _told(at: RoleColumns) -> list[Any]:
    # a clock that is unsigned on MySQL, where less than 0 would be an error
    left = wide(at["ts"]) + at["timeout"] - cast(Epoch(), BigInteger()) if "timeout" in at else null()
    every = at["timeout"] if "timeout" in at else null()
    return [told(at, "queue"), told(at, "id"), every.label("every"), left.label("free_in"), told(at, "retries")]


def _initial(at: RoleColumns) -> dict[str, Any]:
    return {"ts": 0, "timeout": bindparam(param_name("every"), type_=BigInteger())}


@cache
def _shipped() -> RoleMapping:
    return RoleMapping("Timeout", lambda tables: tables.task_timeout, _ROLES)


@cache
def _shipped_bodies(kind: TimeoutKind) -> _TimeoutImpls:
    return _TimeoutImpls(_shipped(), kind)

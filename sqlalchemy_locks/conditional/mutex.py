"""Mutex: taken or free, and taken until somebody releases it.

The pattern: ``UPDATE task_state SET acquired = true WHERE id = ... AND acquired != true``; one of all who try changes
the row. A mutex that nobody released stays taken: that is its purpose, since the next run must not start when the
last one did not succeed. Where a holder that died should not block the next, use a lease of a semaphore.

What is promised: between two releases one acquisition is answered ``True``, at any isolation level. What is relied
on: the row is there (``create``), and nobody changes the flag but through a mutex of this row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Boolean, DateTime, Integer, String, false, literal, or_, select, true

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.conditional.batch import BatchAcquire
from sqlalchemy_locks.conditional.listing import Listing, told
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.conditional_update import Answer, ConditionalAcquire, ConditionalUpdate
from sqlalchemy_locks.core.operation import Execution, Operation, RowsOperation, shaped, shaped_rows
from sqlalchemy_locks.core.roles import ID, RoleColumns, RoleMapping, nonce_of, param_name, role_param
from sqlalchemy_locks.errors import OutcomeUnknown
from sqlalchemy_locks.sql.clock import Fresh

_ROLES = ("queue", "id", "acquired", "owner", "token", "fence", "acquired_at", "retries")


class Mutex:
    """A lock that is taken until it is released, as a flag of a row.

    :param entity: a mapped class or ``Table`` of your own; without one, the shipped table ``lock.task_state``.
    :param id: its column that names the mutex; its values must be unique (in one ``queue``).
    :param acquired: its flag, boolean or integer. ``NULL`` is free.
    :param queue: its column for queues; ids are then unique inside a queue, and each call says ``queue=``.
    :param retries: its column for the acquisitions that are left; ``NULL`` is as many as you like.
    :param owner: its column for who acquired last. :param acquired_at: and for when, by the server's clock.
    :param fence: its column for the fencing token, which each acquisition raises (:class:`Fence` makes one).
    :param token: its column, a string of 32 or a UUID, for a nonce by which ``Locks`` knows its own acquisition again
        after a lost reply; without one such an acquisition raises ``OutcomeUnknown``.
    :raises TypeError: :raises ValueError: for what is not a column of that class's own table.

    The pattern: "Distributed locks: SQL", Mutex.

    >>> mutex = sl.Mutex()
    >>> session.scalar(mutex.create("task_a"))
    >>> session.scalar(mutex.acquire("task_a"))
    True
    """

    def __init__(
        self,
        entity: Any = None,
        *,
        id: Any = None,
        acquired: Any = None,
        queue: Any = None,
        retries: Any = None,
        owner: Any = None,
        acquired_at: Any = None,
        fence: Any = None,
        token: Any = None,
    ) -> None:
        given = {
            "queue": queue,
            "id": id,
            "acquired": acquired,
            "owner": owner,
            "token": token,
            "fence": fence,
            "acquired_at": acquired_at,
            "retries": retries,
        }
        if entity is None and not any(column is not None for column in given.values()):
            self._rows, self._bodies = _shipped()
            return
        if entity is not None and (id is None or acquired is None):
            raise TypeError("Mutex needs id= and acquired=, the columns of the class or table that it was given")
        self._rows = RoleMapping("Mutex", lambda tables: tables.task_state, _ROLES, entity, given)
        self._rows.of_type("acquired", (Boolean, Integer), "a flag")
        self._rows.of_type("owner", (String,), "a name")
        self._rows.of_type("acquired_at", (DateTime,), "an instant")
        self._bodies = _MutexImpls(self._rows)

    @shaped(select(literal(1)))
    def create(self, *ids: Any, queue: Any = None, retries: int | None = None) -> Operation[Any]:
        """Insert the absent ones of some mutexes, free.

        :param retries: how many acquisitions they allow; ``None`` leaves that to the column's default (the shipped
            table: as many as you like).
        :return: how many were absent.

        >>> session.scalar(sl.Mutex().create("task_a", retries=3))
        1
        """
        values = row_admin.ids(self._rows, "mutex.create", ids, queue) | row_admin.retries(self._rows, retries)
        return Operation(self._bodies.create[retries is not None], values)

    @shaped(select(literal(True)))
    def acquire(self, id: Any, *, queue: Any = None, owner: str | None = None, nowait: bool = False) -> Operation[Any]:
        """Take a mutex, if it is free and has a retry left.

        :param owner: who takes it, stored for :meth:`release` and for people.
        :param nowait: don't wait for a transaction that is changing the row: ``False`` then. Without it, in your own
            session, one waits for that transaction's end (the option ``locks_wait`` bounds that, in seconds).
        :return: ``True`` when it is yours, ``False`` when somebody has it, or no retry is left.
        :raises UnknownTask: when it was never created.

        >>> session.scalar(sl.Mutex().acquire("task_b")), session.scalar(sl.Mutex().acquire("task_b"))
        (True, False)
        """
        return Operation(self._bodies.acquire["whether", bool(nowait)], self._values(id, queue, owner))

    @shaped(select(literal(1)))
    def acquire_token(
        self, id: Any, *, queue: Any = None, owner: str | None = None, nowait: bool = False
    ) -> Operation[Any]:
        """As :meth:`acquire`, for a fencing token: greater than any that this mutex gave before, or ``None``.

        >>> session.scalar(sl.Mutex().acquire_token("task_b"))
        1
        """
        self._rows.require("fence", "a fencing token")
        return Operation(self._bodies.acquire["token", bool(nowait)], self._values(id, queue, owner))

    @shaped(select(literal(True)))
    def release(self, id: Any, *, queue: Any = None, owner: str | None = None) -> Operation[Any]:
        """Give a mutex back.

        :param owner: give it back only if it was acquired by this owner.
        :return: ``True`` when it was taken (by that owner) and is free now.
        :raises UnknownTask: when it was never created.

        >>> session.scalar(sl.Mutex().acquire("task_b")), session.scalar(sl.Mutex().release("task_b"))
        (True, True)
        """
        if owner is None:
            return Operation(self._bodies.release[None], self._rows.identity(id, queue))
        whose = {param_name("whose"): self._owner(owner)[param_name("owner")]}
        return Operation(self._bodies.release["owner"], self._rows.identity(id, queue) | whose)

    def _release_own(self, id: Any, queue: Any, nonce: str) -> Operation[Any]:
        """Give back what the acquisition with this nonce took, and nobody else's."""
        whose = {param_name("whose"): nonce_of(self._rows, nonce)}
        return Operation(self._bodies.release["token"], self._rows.identity(id, queue) | whose)

    @shaped_rows(select(ID))
    def capture(self, limit: int, *, queue: Any = None, owner: str | None = None) -> RowsOperation[Any]:
        """Take several mutexes at once, whichever are free, passing over those that others are changing.

        :return: their ids in order, one a row: ``session.scalars(mutex.capture(3)).all()``.

        MySQL and MariaDB lock every row they pass unless the transaction is READ COMMITTED, and refuse in autocommit.
        ``Locks`` sees to both: ``locks.run(...)`` gives the list of ids.

        >>> [row.id for row in session.execute(sl.Mutex().capture(2)).all()]
        ['task_b', 'task_c']
        """
        values = self._rows.queue(queue) | row_admin.limit(limit) | self._owner(owner)
        return RowsOperation(self._bodies.capture, values)

    def held(self, limit: int = 1000) -> RowsOperation[Any]:
        """What is taken, for people: rows of ``queue, id, owner, acquired_at`` (UTC, by the server's clock).

        :param limit: how many at most, those first that were taken first.

        ``None`` stands where there is no such column.

        >>> session.execute(mutex.held()).all()
        """
        return RowsOperation(self._bodies.held, row_admin.limit(limit))

    @shaped(select(literal(True)))
    def set_retries(self, id: Any, retries: int | None, *, queue: Any = None) -> Operation[Any]:
        """Say how many acquisitions are left; ``None``: as many as you like.

        :return: ``True``. :raises UnknownTask: when it was never created.

        >>> session.scalar(sl.Mutex().set_retries("task_b", 3))
        True
        """
        left = row_admin.retries(self._rows, retries, required=True)
        return Operation(self._bodies.set_retries, self._rows.identity(id, queue) | left)

    def _values(self, id: Any, queue: Any, owner: Any) -> dict[str, Any]:
        return self._rows.identity(id, queue) | self._owner(owner)

    def _owner(self, owner: Any) -> dict[str, Any]:
        if owner is None:
            return {param_name("owner"): None} if self._rows.has("owner") else {}
        self._rows.require("owner", "owner")
        return {param_name("owner"): valid_name(owner, "an owner")}


class _MutexAcquire(ConditionalAcquire):
    def free(self, at: RoleColumns) -> list[Any]:
        return [_is_not(at["acquired"], True)]

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        changes = {at["acquired"]: _flag(at["acquired"], True)}
        if "owner" in at:
            changes[at["owner"]] = role_param(at["owner"], "owner")
        if "acquired_at" in at:
            changes[at["acquired_at"]] = Fresh()
        return changes | self.spent(at)


class _Release(ConditionalUpdate):
    """By anybody, by its owner, or by the very acquisition whose nonce is given."""

    def __init__(self, rows: RoleMapping, whose: str | None) -> None:
        super().__init__(rows, "mutex.release")
        self.whose = whose
        self.insists = whose is not None

    def repeatable(self, operation: Operation[Any]) -> bool:
        return self.whose == "token"

    def condition(self, at: RoleColumns) -> list[Any]:
        conditions = [_is_not(at["acquired"], False)]
        if self.whose is not None:
            conditions.append(at[self.whose] == role_param(at[self.whose], "whose"))
        return conditions

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return {at["acquired"]: _flag(at["acquired"], False)}

    def probe(self, execution: Execution) -> Any:
        if self.whose == "token":
            execution.values = {**execution.values, param_name("nonce"): execution.values[param_name("whose")]}
        return super().probe(execution)

    def otherwise(self, execution: Execution, row: Any) -> Any:
        if not execution.again:
            return False
        # an earlier try of this release came into effect if the row is free and carries our nonce still; another's
        # nonce doesn't tell who freed it
        if row is not None and row.mine and not row.acquired:
            return True
        raise OutcomeUnknown(
            f"{self.name}: its answer was lost, and {execution.values[param_name('id')]!r} has been acquired since"
        )


def _flag(column: Any, value: bool) -> Any:
    if isinstance(column.type, Boolean):
        return true() if value else false()
    return literal(int(value), column.type)


def _is_not(column: Any, value: bool) -> Any:
    # `acquired != true` is the pattern's; a flag that may be NULL, and is, was never taken
    different = column != _flag(column, value)
    if isinstance(column.type, Integer) and value:
        different = column == _flag(column, False)  # any other number is taken
    return or_(column.is_(None), different) if column.nullable and value else different


class _MutexImpls:
    """The statements of the mutexes of some rows, built once."""

    def __init__(self, rows: RoleMapping) -> None:
        self.acquire: dict[tuple[Answer, bool], _MutexAcquire] = {}
        names: tuple[tuple[Answer, str], ...] = (("whether", "mutex.acquire"), ("token", "mutex.acquire_token"))
        for answer, name in names:
            patient = _MutexAcquire(rows, name, answer)
            self.acquire[answer, False] = patient
            self.acquire[answer, True] = _MutexAcquire(rows, name, answer, patient=patient)
        self.release = {whose: _Release(rows, whose) for whose in (None, "owner", "token")}
        self.capture = BatchAcquire("mutex.capture", self.acquire["whether", False])
        self.create = {
            retries: row_admin.CreateRows(rows, "mutex.create", _initial, retries=retries) for retries in (False, True)
        }
        self.set_retries = row_admin.SetRetries(rows, "mutex.set_retries")
        self.held = Listing(
            rows,
            "mutex.held",
            columns=lambda at: [told(at, role) for role in ("queue", "id", "owner", "acquired_at")],
            conditions=lambda at: [_is_not(at["acquired"], False)],
            order=lambda at: [at[role] for role in ("acquired_at", "queue", "id") if role in at],
        )


def _initial(at: RoleColumns) -> dict[str, Any]:
    return {"acquired": _flag(at["acquired"], False)}


@cache
def _shipped() -> tuple[RoleMapping, _MutexImpls]:
    rows = RoleMapping("Mutex", lambda tables: tables.task_state, _ROLES)
    return rows, _MutexImpls(rows)

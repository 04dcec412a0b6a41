"""create, resize and delete a semaphore; each change of its capacity is recorded."""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import Boolean, Integer, Row, Text, bindparam, true
from sqlalchemy.exc import IntegrityError

from sqlalchemy_locks._validation import valid_int, valid_name
from sqlalchemy_locks.core.operation import Execution, Operation
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, NONE_ROW, shaped
from sqlalchemy_locks.errors import LockTimeout, SemaphoreHeld
from sqlalchemy_locks.semaphore.base import SemaphoreImpl, insert_unless_present, lock_semaphore, unknown_semaphore
from sqlalchemy_locks.semaphore.permit_sums import mark_changed, read_usage, sum_again
from sqlalchemy_locks.semaphore.statements import DELETED, HELD, UNKNOWN, Statements
from sqlalchemy_locks.sql.elements import WAIT_MS, LockFunction

_NAME, _BY = bindparam("name", type_=Text()), bindparam("changed_by", type_=Text())
_CAPACITY = bindparam("capacity", type_=Integer())
#: the maximum number of attempts while others create and delete the same semaphore
_ROUNDS = 100


class CreateSemaphore(SemaphoreImpl):
    name = "semaphore.create"

    def call(self) -> LockFunction:
        on_demand = bindparam("on_demand", type_=Boolean())
        return LockFunction("semaphore_create", _NAME, _CAPACITY, _BY, WAIT_MS, on_demand, type_=Boolean())

    def run_statements(self, execution: Execution, sql: Statements) -> bool:
        name, capacity, on_demand = (execution.values[key] for key in ("name", "capacity", "on_demand"))
        # first without a lock, so that an existing semaphore is neither waited for nor locked
        row = execution.execute(sql.find_semaphore, {"by_name": name}).first()
        for _ in range(_ROUNDS):
            semaphore = None
            if row is None:
                semaphore = self._insert(execution, sql)
            elif row.capacity is None:
                # the row of a deleted semaphore keeps its fence, from which a new one of that name continues
                values = {"row_id": row.id, "new_capacity": capacity, "first_use": on_demand}
                semaphore = row.id if execution.execute(sql.revive_semaphore, values).rowcount else None
            elif on_demand or not row.on_demand:
                return False
            elif execution.execute(sql.clear_on_demand, {"row_id": row.id}).rowcount:
                mark_changed(execution, row.id)
                return False
            if semaphore is not None:
                mark_changed(execution, semaphore)
                if not on_demand:
                    record_change(execution, sql, semaphore, None, capacity)
                return True
            # others have created, deleted or removed it since
            row = execution.execute(sql.lock_semaphore, {"by_name": name}).first()
        raise LockTimeout(f"others create and remove the semaphore {name!r} again and again")

    def _insert(self, execution: Execution, sql: Statements) -> int | None:
        # The fence begins above that of every removed semaphore, whatever its name was. The floor is locked in shared
        # mode, so that no semaphore is removed before this one is inserted.
        floor = execution.execute(sql.share_floor, {}).first()
        if floor is None:  # the table was emptied
            with contextlib.suppress(IntegrityError):
                execution.execute(sql.insert_semaphore, {"name": "", "capacity": None, "on_demand": False, "fence": 0})
            floor = execution.execute(sql.share_floor, {}).one()
        values = {key: execution.values[key] for key in ("name", "capacity", "on_demand")}
        return insert_unless_present(execution, sql.insert_semaphore, {**values, "fence": floor.fence})


class ResizeSemaphore(SemaphoreImpl):
    name = "semaphore.resize"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return False  # a second run could undo a change that others made in between

    def call(self) -> LockFunction:
        return LockFunction("semaphore_resize", _NAME, _CAPACITY, _BY, WAIT_MS, true(), type_=Integer())

    def answer(self, execution: Execution, row: Row[Any]) -> int:
        if row[0] is None:
            raise unknown_semaphore(execution.values["name"])
        return int(row[0])

    def run_statements(self, execution: Execution, sql: Statements) -> int:
        row, capacity = lock_semaphore(execution, sql, execution.values["name"]), execution.values["capacity"]
        if row is None:
            raise unknown_semaphore(execution.values["name"])
        if row.capacity != capacity:
            execution.execute(sql.set_capacity, {"row_id": row.id, "new_capacity": capacity})
            execution.execute(sql.clear_on_demand, {"row_id": row.id})
            mark_changed(execution, row.id)
            record_change(execution, sql, row.id, row.capacity, capacity)
        elif row.on_demand:
            # the capacity stays, but the semaphore now counts as created explicitly
            execution.execute(sql.clear_on_demand, {"row_id": row.id})
            mark_changed(execution, row.id)
        return int(row.capacity)


class DeleteSemaphore(SemaphoreImpl):
    name = "semaphore.delete"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return False  # a second run could undo a change that others made in between

    def call(self) -> LockFunction:
        return LockFunction("semaphore_delete", _NAME, _BY, WAIT_MS, type_=Text())

    def answer(self, execution: Execution, row: Row[Any]) -> None:
        if row[0] == UNKNOWN:
            raise unknown_semaphore(execution.values["name"])
        if row[0] == HELD:
            raise semaphore_held(execution)
        assert row[0] == DELETED

    def run_statements(self, execution: Execution, sql: Statements) -> None:
        row = lock_semaphore(execution, sql, execution.values["name"])
        if row is None:
            raise unknown_semaphore(execution.values["name"])
        in_use = read_usage(execution, sql, [row]).sums[row.id]
        if in_use and (current := sum_again(execution, sql, row, 0)) is not None:
            in_use, _ = current
        if in_use:
            raise semaphore_held(execution)
        execution.execute(sql.set_capacity, {"row_id": row.id, "new_capacity": None})
        mark_changed(execution, row.id)
        record_change(execution, sql, row.id, row.capacity, None)


def record_change(execution: Execution, sql: Statements, semaphore: int, old: int | None, new: int | None) -> None:
    change = {"semaphore_id": semaphore, "old_capacity": old, "new_capacity": new}
    execution.execute(sql.insert_history, {**change, "changed_by": execution.values["changed_by"]})


def semaphore_held(execution: Execution) -> SemaphoreHeld:
    return SemaphoreHeld(
        f"permits of the semaphore {execution.values['name']!r} are held: semaphore.holders lists their holders; "
        "with a capacity of 0 no new ones are granted"
    )


_CREATE, _RESIZE, _DELETE = CreateSemaphore(), ResizeSemaphore(), DeleteSemaphore()


def _values(name: str, by: str | None, **values: Any) -> dict[str, Any]:
    changed_by = None if by is None else valid_name(by, "changed_by")
    return {"name": valid_name(name, "a semaphore's name"), "changed_by": changed_by, **values}


@shaped(BOOL_ROW)
def create(name: str, capacity: int, *, by: str | None = None) -> Operation[Any]:
    """Create a semaphore, unless there is one of that name.

    :param name: up to 255 characters; upper and lower case, accents and emoji tell names apart on every engine.
    :param capacity: how many permits there are, at least 0.
    :param by: who changes it, for ``history``.
    :return: ``True`` when it was created; ``False`` when there was one, which keeps its capacity: see :func:`resize`.

    If a lease has created the semaphore on its first use, it is kept from now on, even when it is no longer used.

    >>> session.execute(sl.semaphore.create("backup-slots", capacity=10))
    """
    return Operation(_CREATE, _values(name, by, capacity=valid_int(capacity, "a capacity", 0), on_demand=False))


def create_for_lease(name: str) -> Operation[Any]:
    """Create the semaphore of a lease, which :func:`clean_leases` removes when it is no longer used."""
    return Operation(_CREATE, _values(name, None, capacity=1, on_demand=True))


@shaped(INT_ROW)
def resize(name: str, capacity: int, *, by: str | None = None) -> Operation[Any]:
    """Change how many permits there are.

    :param capacity: at least 0. If more permits are held, they stay held, and none is granted until there is room.
    :param by: who changes it, for ``history``.
    :return: the capacity it had.
    :raises UnknownSemaphore: when there is none of that name.

    If a lease has created the semaphore on its first use, it is kept from now on, even if the capacity is the same.
    ``Locks`` raises :class:`~sqlalchemy_locks.OutcomeUnknown` after a lost reply, and doesn't repeat the call: it could
    undo a change that others made in between. The same holds for :func:`delete`.

    >>> session.execute(sl.semaphore.resize("backup-slots", 12, by="ops"))
    """
    return Operation(_RESIZE, _values(name, by, capacity=valid_int(capacity, "a capacity", 0)))


@shaped(NONE_ROW)
def delete(name: str, *, by: str | None = None) -> Operation[Any]:
    """Delete a semaphore of which no permit is held.

    :param by: who deletes it, for ``history``.
    :raises SemaphoreHeld: when permits are held; expired ones don't count.
    :raises UnknownSemaphore: when there is none of that name.

    Its last fencing token is kept: a new semaphore of this name continues from it.

    >>> session.execute(sl.semaphore.delete("network"))
    """
    return Operation(_DELETE, _values(name, by))

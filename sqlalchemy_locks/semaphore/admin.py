"""create, resize and delete: a semaphore's life, each change of its capacity recorded."""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import Boolean, Integer, Text, bindparam, literal, select, true
from sqlalchemy.exc import IntegrityError

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.operation import Execution, Operation, shaped
from sqlalchemy_locks.errors import LockTimeout, SemaphoreHeld, UnknownSemaphore
from sqlalchemy_locks.semaphore.base import LOCK_WAIT, SemaphoreBody, locked, make_room, surely, touch, used, whole
from sqlalchemy_locks.semaphore.statements import DELETED, HELD, UNKNOWN
from sqlalchemy_locks.sql.elements import LockFunction

_NAME, _BY = bindparam("name", type_=Text()), bindparam("changed_by", type_=Text())
_CAPACITY = bindparam("capacity", type_=Integer())
_ROUNDS = 100


class CreateSemaphores(SemaphoreBody):
    def call(self) -> LockFunction:
        return LockFunction(
            "semaphore_create",
            _NAME,
            _CAPACITY,
            _BY,
            LOCK_WAIT,
            bindparam("on_demand", type_=Boolean()),
            type_=Boolean(),
        )

    def by_statements(self, execution: Execution, made: Any) -> bool:
        called, capacity, on_demand = (execution.values[key] for key in ("name", "capacity", "on_demand"))
        # without a lock first: who finds it there shall not wait, nor lock it
        row = execution.execute(made.look, {"called": called}).first()
        for _ in range(_ROUNDS):
            semaphore = None
            if row is None:
                semaphore = self._insert(execution, made)
            elif row.capacity is None:
                # what a deleted one has left keeps its fence, and so the name goes on counting
                values = {"which": row.id, "size": capacity, "first_use": on_demand}
                semaphore = row.id if execution.execute(made.revive, values).rowcount else None
            elif on_demand or not row.on_demand or execution.execute(made.keep, {"which": row.id}).rowcount:
                return False
            if semaphore is not None:
                touch(execution, semaphore)
                if not on_demand:
                    record(execution, made, semaphore, None, capacity)
                return True
            # made, deleted or removed by others since
            row = execution.execute(made.lock, {"called": called}).first()
        raise LockTimeout(f"the semaphore {called!r} comes and goes: others make it, and clean it up")

    def _insert(self, execution: Execution, made: Any) -> Any:
        # above what any that was removed has given, of whatever name; shared, so that none is removed before this one
        # is there
        floor = execution.execute(made.floor, {}).first()
        if floor is None:  # the table was emptied
            with contextlib.suppress(IntegrityError):
                execution.execute(made.create, {"name": "", "capacity": None, "on_demand": False, "fence": 0})
            floor = execution.execute(made.floor, {}).one()
        values = {key: execution.values[key] for key in ("name", "capacity", "on_demand")}
        try:
            result = execution.execute(made.create, {**values, "fence": floor.fence})
        except IntegrityError as error:
            if execution.backend.locking == "file" or not execution.backend.duplicate(error):
                raise
            return None
        key: Any = result.inserted_primary_key
        return key[0]


class Resize(SemaphoreBody):
    def repeatable(self, operation: Operation[Any]) -> bool:
        return False  # done again, it would undo what others did meanwhile

    def call(self) -> LockFunction:
        return LockFunction("semaphore_resize", _NAME, _CAPACITY, _BY, LOCK_WAIT, true(), type_=Integer())

    def answer(self, execution: Execution, row: Any) -> int:
        if row[0] is None:
            raise unknown(execution)
        return int(row[0])

    def by_statements(self, execution: Execution, made: Any) -> int:
        row, capacity = locked(execution, made, execution.values["name"]), execution.values["capacity"]
        if row is None:
            raise unknown(execution)
        if row.capacity != capacity:
            execution.execute(made.resize, {"which": row.id, "size": capacity})
            execution.execute(made.keep, {"which": row.id})
            touch(execution, row.id)
            record(execution, made, row.id, row.capacity, capacity)
        elif row.on_demand:
            execution.execute(made.keep, {"which": row.id})  # somebody's own now, though nothing has changed
        return int(row.capacity)


class DeleteSemaphores(SemaphoreBody):
    def repeatable(self, operation: Operation[Any]) -> bool:
        return False  # done again, it would undo what others did meanwhile

    def call(self) -> LockFunction:
        return LockFunction("semaphore_delete", _NAME, _BY, LOCK_WAIT, type_=Text())

    def answer(self, execution: Execution, row: Any) -> None:
        if row[0] == UNKNOWN:
            raise unknown(execution)
        if row[0] == HELD:
            raise held(execution)
        assert row[0] == DELETED

    def by_statements(self, execution: Execution, made: Any) -> None:
        row = locked(execution, made, execution.values["name"])
        if row is None:
            raise unknown(execution)
        in_use = used(execution, made, [row])[0][row.id]
        if in_use and make_room(execution, made, row.id, 0):
            in_use = surely(execution, made, row)[0]
        if in_use:
            raise held(execution)
        execution.execute(made.resize, {"which": row.id, "size": None})
        touch(execution, row.id)
        record(execution, made, row.id, row.capacity, None)


def record(execution: Execution, made: Any, semaphore: int, old: int | None, new: int | None) -> None:
    change = {"semaphore_id": semaphore, "old_capacity": old, "new_capacity": new}
    execution.execute(made.record, {**change, "changed_by": execution.values["changed_by"]})


def unknown(execution: Execution) -> UnknownSemaphore:
    return UnknownSemaphore(f"there is no semaphore {execution.values['name']!r}: make it with semaphore.create")


def held(execution: Execution) -> SemaphoreHeld:
    return SemaphoreHeld(
        f"permits of the semaphore {execution.values['name']!r} are held: semaphore.holders tells by whom; "
        "with a capacity of 0 nobody gets new ones"
    )


_CREATE, _RESIZE, _DELETE = CreateSemaphores(), Resize(), DeleteSemaphores()


def _values(name: str, by: str | None, **values: Any) -> dict[str, Any]:
    # lock_wait for whoever has it compiled: each run gives its own
    changed_by = None if by is None else valid_name(by, "who changes a semaphore")
    return {"name": valid_name(name, "a semaphore's name"), "changed_by": changed_by, "lock_wait": None, **values}


@shaped(select(literal(True)))
def create(name: str, capacity: int, *, by: str | None = None) -> Operation[Any]:
    """Make a semaphore, unless there is one of that name.

    :param name: up to 255 characters; upper and lower case, accents and emoji tell names apart on every engine.
    :param capacity: how many permits there are, at least 0.
    :param by: who does it, for ``history``.
    :return: ``True`` when it was made; ``False`` when there was one, which keeps its capacity: see :func:`resize`.

    One that a lease has made on its first use is kept from now on, whether it is used or not.

    >>> session.execute(sl.semaphore.create("backup-slots", capacity=10))
    """
    return Operation(_CREATE, _values(name, by, capacity=whole(capacity, "a capacity", 0), on_demand=False))


def on_first_use(name: str) -> Operation[Any]:
    """Make the semaphore of a lease, which :func:`clean_leases` removes when it is no longer used."""
    return Operation(_CREATE, _values(name, None, capacity=1, on_demand=True))


@shaped(select(literal(1)))
def resize(name: str, capacity: int, *, by: str | None = None) -> Operation[Any]:
    """Change how many permits there are.

    :param capacity: at least 0. Below what is held it evicts nobody, and nobody gets a permit until there is room. One
        that a lease has made on its first use is kept from now on, though its capacity may be the same.
    :param by: who does it, for ``history``.
    :return: the capacity it had.
    :raises UnknownSemaphore: when there is none of that name.

    Through ``Locks`` a lost reply is :class:`~sqlalchemy_locks.OutcomeUnknown`, and it isn't done again, since that
    would undo what others did meanwhile. So it is with :func:`delete`.

    >>> session.execute(sl.semaphore.resize("backup-slots", 12, by="ops"))
    """
    return Operation(_RESIZE, _values(name, by, capacity=whole(capacity, "a capacity", 0)))


@shaped(select(literal(None)))
def delete(name: str, *, by: str | None = None) -> Operation[Any]:
    """Delete a semaphore that nobody holds a permit of.

    :raises SemaphoreHeld: when somebody does; what has expired doesn't count.
    :raises UnknownSemaphore: when there is none of that name.

    Its last fencing token is kept: a semaphore that is made again under this name goes on counting.

    >>> session.execute(sl.semaphore.delete("network"))
    """
    return Operation(_DELETE, _values(name, by))

"""MySQL: the gate before a key's first row, so that no INSERT ever waits there.

MySQL can look at a row without waiting (NOWAIT), but an INSERT always waits for another transaction's
uncommitted row of the same key. So a key's first row is inserted behind a gate: a named lock of the server
(``GET_LOCK``), held for the few statements around the INSERT. One looks, passes the gate, looks again, and only
then inserts. Nobody waits at the gate for more than a second, after which one looks anew: it adds no
deadlock that InnoDB could not see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Insert, Integer, Select, String, Table, bindparam, func, literal, select
from sqlalchemy.sql import Executable

from .elements import Gate, ReadCommitted, Writable
from .errors import LockTimeout
from .operation import Run, beside, translated

_KEY = bindparam("lock_key", type_=BigInteger())


@contextlib.contextmanager
def gate(run: Run, key: int, *, seconds: int) -> Iterator[tuple[bool, bool]]:
    """Hold the gate of a key: whether it was free, and whether this transaction reads at READ COMMITTED."""
    enter, leave = _enter_and_leave(run.place.tables.locked_keys)
    answer: Any = run.execute(enter, {"lock_key": key, "seconds": seconds}).one()
    passed, read_committed, writable = answer
    try:
        if not writable:
            raise run.engine.not_writable()
        yield bool(passed), bool(read_committed)
    finally:
        if passed and not run.connection.invalidated:
            run.execute(leave, {"lock_key": key})


def made_present(run: Run, *, may_insert: bool) -> bool:
    """Whether the key has a row, committed or not, putting one there if need be.

    On a connection of its own, opened and closed for it: above READ COMMITTED the transaction's own look at an
    absent row would lock the gap, and its own first row could be rolled back under those who wait for it.
    """
    table = run.place.tables.locked_keys
    values = {"lock_key": run.values["lock_key"]}
    known, look, insert = _look_and_insert(table)
    with beside(run) as connection:
        # without a lock where that tells: this connection's must not be in the way of the transaction's own
        if connection.execute(known, values).first() is not None:
            return True
        try:
            with translated(run.engine):
                if connection.execute(look, values).first() is not None:
                    return True
        except LockTimeout:
            return True
        if may_insert:
            with run.engine.bounded(connection, 1), contextlib.suppress(LockTimeout), translated(run.engine):
                connection.execute(insert, values)
        return may_insert


@cache
def _look_and_insert(table: Table) -> tuple[Select[Any], Select[Any], Insert]:
    known = select(table.c.key).where(table.c.key == _KEY)
    return known, known.with_for_update(read=True, nowait=True), Insert(table).prefix_with("IGNORE").values(key=_KEY)


@cache
def _enter_and_leave(table: Table) -> tuple[Executable, Executable]:
    name = Gate(literal(table.fullname, String()), _KEY)
    enter = select(func.get_lock(name, bindparam("seconds", type_=Integer())), ReadCommitted(), Writable())
    return enter, select(func.release_lock(name))

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
from enum import Enum
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Insert, Integer, Select, String, Table, bindparam, func, literal, select
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import Execution, side_connection, translated
from sqlalchemy_locks.errors import LockTimeout
from sqlalchemy_locks.sql.elements import Gate, ReadCommitted, Writable

_KEY = bindparam("lock_key", type_=BigInteger())


@contextlib.contextmanager
def insert_guard(execution: Execution, key: int, *, seconds: int) -> Iterator[tuple[bool, bool]]:
    """Hold the gate of a key: whether it was free, and whether this transaction reads at READ COMMITTED."""
    enter, leave = _enter_and_leave(execution.context.tables.locked_keys)
    answer: Any = execution.execute(enter, {"lock_key": key, "seconds": seconds}).one()
    passed, read_committed, writable = answer
    try:
        if not writable:
            raise execution.backend.not_writable()
        yield bool(passed), bool(read_committed)
    finally:
        if passed and not execution.connection.invalidated:
            execution.execute(leave, {"lock_key": key})


class Presence(Enum):
    """Whether a key has a row, as far as a connection beside can tell."""

    ABSENT = "absent, and may not be made, or can't at once"
    UNCOMMITTED = "being made, in a transaction that has not ended"
    MADE = "made just now"
    COMMITTED = "committed"


def make_present(execution: Execution, key: int, *, may_insert: bool) -> Presence:
    """Put a key's row there if need be, and commit it.

    On a connection of its own, opened and closed for it: above READ COMMITTED the transaction's own look at an
    absent row would lock the gap, and its own first row could be rolled back under those who wait for it.
    """
    known, look, _, insert = _beside(execution.context.tables.locked_keys)
    values = {"lock_key": key}
    with _decided(execution) as connection:
        # without a lock where that tells: this connection's must not be in the way of the transaction's own
        if connection.execute(known, values, execution_options=execution.options).first() is not None:
            return Presence.COMMITTED
        try:
            with translated(execution.backend):
                if connection.execute(look, values, execution_options=execution.options).first() is not None:
                    return Presence.COMMITTED
        except LockTimeout:
            return Presence.UNCOMMITTED
        if may_insert:
            with (
                execution.backend.bounded(connection, 1),
                contextlib.suppress(LockTimeout),
                translated(execution.backend),
            ):
                connection.execute(insert, values, execution_options=execution.options)
                return Presence.MADE
        return Presence.ABSENT


def until_decided(execution: Execution, key: int) -> bool:
    """Wait, on a connection of its own, for the transaction that is just making a key's row: whether it is committed.

    No wait at all where it is. In the transaction itself a wait for a row that is then rolled back would leave a lock
    on the gap, above READ COMMITTED.
    """
    known, _, wait, _ = _beside(execution.context.tables.locked_keys)
    values = {"lock_key": key}
    with _decided(execution) as connection:
        if connection.execute(known, values, execution_options=execution.options).first() is not None:
            return True
        bounded = (
            contextlib.nullcontext()
            if execution.wait is None
            else execution.backend.bounded(connection, execution.wait)
        )
        with bounded, translated(execution.backend):
            return connection.execute(wait, values, execution_options=execution.options).first() is not None


@contextlib.contextmanager
def _decided(execution: Execution) -> Iterator[Connection]:
    """A connection beside, that locks no gap, not even for as long as a statement takes."""
    with side_connection(execution) as connection:
        connection.exec_driver_sql("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        yield connection


@cache
def _beside(table: Table) -> tuple[Select[Any], Select[Any], Select[Any], Insert]:
    known = select(table.c.key).where(table.c.key == _KEY)
    look, wait = known.with_for_update(read=True, nowait=True), known.with_for_update()
    return known, look, wait, Insert(table).prefix_with("IGNORE").values(key=_KEY)


@cache
def _enter_and_leave(table: Table) -> tuple[Executable, Executable]:
    name = Gate(literal(table.fullname, String()), _KEY)
    enter = select(func.get_lock(name, bindparam("seconds", type_=Integer())), ReadCommitted(), Writable())
    return enter, select(func.release_lock(name))

"""MySQL: the guard around a key's first INSERT, so that no INSERT ever waits there.

MySQL can read a row without waiting (NOWAIT), but an INSERT always waits for another transaction's
uncommitted row of the same key. So a key's first row is inserted under a guard: a named lock of the server
(``GET_LOCK``), held for the few statements around the INSERT. A transaction reads, acquires the guard, reads again, and
only then inserts. No transaction waits for the guard longer than a second before it reads again: the guard adds no
deadlock that InnoDB could not see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

from sqlalchemy import Insert, Integer, Select, String, Table, bindparam, func, literal, select
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import Execution, side_connection, translated
from sqlalchemy_locks.errors import LockTimeout
from sqlalchemy_locks.lock.key_locks import LOCK_KEY
from sqlalchemy_locks.sql.elements import InsertGuard, ReadCommitted, Writable


@contextlib.contextmanager
def insert_guard(execution: Execution, key: int, *, seconds: int) -> Iterator[tuple[bool, bool]]:
    """Hold the insert guard of a key, if it is free within ``seconds``.

    :return: whether it is held, and whether this transaction is at READ COMMITTED.
    """
    acquire, release = _guard_statements(execution.context.tables.locked_keys)
    answer: Any = execution.execute(acquire, {"lock_key": key, "seconds": seconds}).one()
    held, read_committed, writable = answer
    try:
        if not writable:
            raise execution.backend.not_writable()
        yield bool(held), bool(read_committed)
    finally:
        if held and not execution.connection.invalidated:
            execution.execute(release, {"lock_key": key})


class RowState(Enum):
    """What a side connection sees of a key's row."""

    ABSENT = "absent, and not inserted: not allowed, or it would have waited"
    UNCOMMITTED = "inserted by a transaction that has not ended"
    INSERTED = "inserted and committed by this call"
    COMMITTED = "committed before"


def ensure_row(execution: Execution, key: int, *, may_insert: bool, within: float | None) -> RowState:
    """Insert a key's row if it is absent, and commit it.

    On a side connection: above READ COMMITTED the transaction's own read of an absent row would lock the gap, and its
    own first row could be rolled back under the transactions that wait for it.

    :param within: how long to wait for the table, in seconds, where another session alters it.
    """
    exists, lock_nowait, _, insert = _row_statements(execution.context.tables.locked_keys)
    values = {"lock_key": key}
    with _read_committed_connection(execution, within) as connection:
        # without a lock where that suffices: this connection's must not block the transaction's own
        if connection.execute(exists, values, execution_options=execution.options).first() is not None:
            return RowState.COMMITTED
        try:
            with translated(execution.backend):
                if connection.execute(lock_nowait, values, execution_options=execution.options).first() is not None:
                    return RowState.COMMITTED
        except LockTimeout:
            return RowState.UNCOMMITTED
        if may_insert:
            with (
                execution.backend.bounded(connection, 1),
                contextlib.suppress(LockTimeout),
                translated(execution.backend),
            ):
                connection.execute(insert, values, execution_options=execution.options)
                return RowState.INSERTED
        return RowState.ABSENT


def wait_for_inserter(execution: Execution, key: int) -> bool:
    """Wait, on a side connection, until a transaction that has inserted a key's row ends.

    Return immediately if the row is committed. In the transaction itself a wait for a row that is then rolled back
    would leave a lock on the gap, above READ COMMITTED.

    :return: whether the row is committed.
    """
    exists, _, lock, _ = _row_statements(execution.context.tables.locked_keys)
    values = {"lock_key": key}
    with _read_committed_connection(execution, execution.wait) as connection:
        if connection.execute(exists, values, execution_options=execution.options).first() is not None:
            return True
        bounded = (
            contextlib.nullcontext()
            if execution.wait is None
            else execution.backend.bounded(connection, execution.wait)
        )
        with bounded, translated(execution.backend):
            return connection.execute(lock, values, execution_options=execution.options).first() is not None


@contextlib.contextmanager
def _read_committed_connection(execution: Execution, within: float | None) -> Iterator[Connection]:
    """A side connection that locks no gap, not even while a statement runs."""
    with side_connection(execution, within=within) as connection:
        connection.exec_driver_sql("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        yield connection


@cache
def _row_statements(table: Table) -> tuple[Select[Any], Select[Any], Select[Any], Insert]:
    exists = select(table.c.key).where(table.c.key == LOCK_KEY)
    lock_nowait, lock = exists.with_for_update(read=True, nowait=True), exists.with_for_update()
    return exists, lock_nowait, lock, Insert(table).prefix_with("IGNORE").values(key=LOCK_KEY)


@cache
def _guard_statements(table: Table) -> tuple[Executable, Executable]:
    name = InsertGuard(literal(table.fullname, String()), LOCK_KEY)
    acquire = select(func.get_lock(name, bindparam("seconds", type_=Integer())), ReadCommitted(), Writable())
    return acquire, select(func.release_lock(name))

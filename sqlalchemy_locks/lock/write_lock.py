"""SQLite: every lock is the database's one write lock, for which ``dialects/sqlite.py`` waits."""

from __future__ import annotations

from sqlalchemy import Table

from sqlalchemy_locks.core.operation import Execution, write_nothing
from sqlalchemy_locks.errors import LockTimeout


def try_acquire(execution: Execution) -> bool:
    """Acquire the write lock if it is free; return whether it is held."""
    try:
        with execution.backend.bounded(execution.connection, 0):
            execution.execute(write_nothing(execution.context.tables.locked_keys), {})
    except LockTimeout:
        return False
    execution.require_transaction()
    return True


def acquire(execution: Execution, table: Table | None = None) -> None:
    """Acquire the write lock, waiting for it.

    :param table: the table for the write that takes it; by default one of this library's.
    """
    if table is None:
        table = execution.context.tables.locked_keys
    with execution.waiting():
        execution.execute(write_nothing(table), {})
    execution.require_transaction()

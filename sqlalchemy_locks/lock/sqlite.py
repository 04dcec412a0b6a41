"""SQLite: every lock is the database's one write lock."""

from __future__ import annotations

from sqlalchemy import Delete, delete, false
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.errors import LockTimeout


def try_write_lock(execution: Execution) -> bool:
    """Acquire the write lock if it is free; return whether it is held."""
    try:
        with execution.backend.bounded(execution.connection, 0):
            execution.execute(write_nothing(execution.context), {})
    except LockTimeout:
        return False
    execution.require_transaction()
    return True


def wait_for_write_lock(execution: Execution, statement: Executable | None = None) -> None:
    """Acquire the write lock, waiting for it.

    :param statement: the write to do it with; by default one of this library's table.
    """
    if statement is None:
        statement = write_nothing(execution.context)
    with execution.waiting():
        execution.execute(statement, {})
    execution.require_transaction()


def write_nothing(context: BuildContext) -> Delete:
    """Return a write that changes nothing: SQLite takes its write lock when the statement starts, rows or no rows."""
    return delete(context.tables.locked_keys).where(false())

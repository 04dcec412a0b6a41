"""SQLite: every lock is the database's one write lock."""

from __future__ import annotations

from sqlalchemy import Delete, delete, false, literal_column, null, select
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.errors import LockTimeout
from sqlalchemy_locks.lock.key_locks import KeyLocks, LockMode


class WriteLock(KeyLocks):
    """Locks on keys where a database has one writer at a time, whatever the key."""

    acquire_needs = "where the busy timeout is set to zero around it"

    def acquire_statement(self, context: BuildContext, mode: LockMode) -> Executable | None:
        return None if mode.tries else _write_nothing(context)

    def acquire(self, execution: Execution, mode: LockMode, statement: Executable | None) -> bool | None:
        if not mode.tries:
            wait_for_write_lock(execution)
            return None
        try:
            with execution.backend.bounded(execution.connection, 0):
                execution.execute(_write_nothing(execution.context), {})
        except LockTimeout:
            return False
        _check_transaction(execution)
        return True

    def unlock_statement(self) -> Executable:
        return select(null())  # the lock leaves nothing that could be removed

    def vacuum_statement(self) -> Executable | None:
        return select(literal_column("0"))

    def create_statement(self) -> Executable | None:
        return select(literal_column("0"))


def wait_for_write_lock(execution: Execution, statement: Executable | None = None) -> None:
    """Acquire the write lock, waiting for it.

    :param statement: the write to do it with; by default one of this library's table.
    """
    if statement is None:
        statement = _write_nothing(execution.context)
    with execution.waiting():
        execution.execute(statement, {})
    _check_transaction(execution)


def _check_transaction(execution: Execution) -> None:
    if not execution.backend.transaction_begun(execution.connection):
        raise execution.backend.refuse_autocommit(execution.operation.name)


def _write_nothing(context: BuildContext) -> Delete:
    """Return a write that changes nothing: SQLite takes its write lock when the statement starts, rows or no rows."""
    return delete(context.tables.locked_keys).where(false())

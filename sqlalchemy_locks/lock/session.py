"""The server's own session locks: held by a connection, over its transactions, until unlocked or given back.

PostgreSQL's ``pg_advisory_lock`` and MySQL's and MariaDB's ``GET_LOCK``. A session of an ORM gives its connection
back to the pool at each commit, and somebody else would go on with it, still locked: so these run on a
``Connection``, or on a session bound to one, and a connection that returns to its pool leaves them behind.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Integer, bindparam, event, literal, select
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, shaped
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import LockTimeout, Unsupported
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.sql.elements import SessionLock, SessionUnlock

_MARK = "sqlalchemy_locks.release"
_YEAR = 31_536_000
_KEY = bindparam("lock_key", type_=BigInteger())


class _OfConnection(OperationImpl):
    held_by = "connection"
    needs_installation = False

    def several(self, context: BuildContext) -> str:
        return (
            f"{self.name} is a lock of the server's sessions, and {context.backend.name} has none: "
            "use lock.exclusive, which ends with the transaction"
        )

    def check_connection(self, execution: Execution) -> None:
        if execution.backend.release_session_locks is None:
            raise Unsupported(self.several(execution.context))
        if execution.session is not None and not isinstance(
            execution.session.get_bind(**execution.bind_arguments), Connection
        ):
            raise Unsupported(
                f"{self.name} belongs to a connection, and a session gives its own back at each commit, still "
                "locked: execute it on a Connection, or on a session bound to one"
            )
        if execution.backend.pooled(execution.connection):
            raise Unsupported(
                f"{self.name} is about a lock of one of the server's sessions, and a pooler such as PgBouncer is in "
                "between, which may give the next transaction another one: use lock.exclusive, which ends with the "
                "transaction; or, if the pooler is in session mode, say so by the engine's execution option "
                "locks_session_pooling=True"
            )


class _SessionLock(_OfConnection):
    name = "lock.session_exclusive"

    def build(self, context: BuildContext) -> Executable | None:
        if context.backend.release_session_locks is None:
            return None
        return select(SessionLock(_KEY, bindparam("seconds", _YEAR, type_=Integer())))

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        if execution.wait is None:
            answer = execution.execute(statement).scalar()
        else:
            with execution.backend.bounded(execution.connection, execution.wait):
                answer = execution.execute(
                    statement, {**execution.values, "seconds": max(1, round(execution.wait + 0.5))}
                ).scalar()
        if answer == "refused":
            raise execution.backend.not_writable()
        # nothing at all: the server gave up waiting, because the statement was killed or ran out of its time
        if answer in ("0", None):
            raise LockTimeout(f"the session lock of key {execution.values['lock_key']} was not free in time")
        _leave_behind(execution.connection)
        return None


class _SessionUnlock(_OfConnection):
    name = "lock.session_unlock"

    def build(self, context: BuildContext) -> Executable | None:
        return None if context.backend.release_session_locks is None else select(SessionUnlock(_KEY))

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        return bool(execution.execute(statement).scalar())


def _leave_behind(connection: Connection) -> None:
    """Have the pool release what this connection holds before anybody else gets it."""
    release = backend_for(connection.dialect).release_session_locks
    connection.info[_MARK] = release
    pool = connection.engine.pool
    # not event.contains(), which knows a pool by its place in memory, where another one may have been before
    if _on_reset not in pool.dispatch.reset:
        event.listen(pool, "reset", _on_reset)


def _on_reset(dbapi_connection: Any, record: Any, reset_state: Any) -> None:
    # a connection that was detached is closed, one that can only be terminated takes its locks with it
    if record is None or reset_state.terminate_only:
        return
    release = record.info.pop(_MARK, None)
    if release is None:
        return
    dbapi_connection.rollback()
    cursor = dbapi_connection.cursor()
    try:
        cursor.execute(release)
        cursor.fetchall()
    finally:
        cursor.close()
    dbapi_connection.rollback()


_LOCK, _UNLOCK = _SessionLock(), _SessionUnlock()


@shaped(select(literal(None)))
def session_exclusive(name: str | int) -> Operation[Any]:
    """Wait for a lock of this connection's own, held over transactions until unlocked, closed or given back.

    :param name: as in :func:`sqlalchemy_locks.lock.exclusive`. On PostgreSQL and YugabyteDB it is the same lock as
        ``lock.exclusive`` of that name (unless the table bodies are installed); elsewhere it is another one.
    :return: ``None``, once it is held. Each further call needs a further unlock.
    :raises Unsupported: on SQLite; in a session that isn't bound to a ``Connection``; through a pooler; on a YugabyteDB
        that was told to grant advisory locks without taking them.
    :raises LockTimeout: the option ``locks_wait`` (whole seconds on MySQL and MariaDB) ended the wait.
    :raises NotWritable: on a standby or replica.

    Through PgBouncer it is refused, since in its transaction mode a connection's next transaction is another session's;
    with the engine's execution option ``locks_session_pooling=True`` it isn't, for a pooler in session mode.

    >>> with engine.connect() as connection:
    ...     connection.execute(sl.lock.session_exclusive("nightly"))
    ...     connection.execute(sl.lock.session_unlock("nightly"))
    """
    return Operation(_LOCK, {"lock_key": as_key(name)})


@shaped(select(literal(True)))
def session_unlock(name: str | int) -> Operation[Any]:
    """Give up a lock of :func:`session_exclusive`.

    :return: ``True`` when this connection held it, ``False`` when it didn't.
    :raises Unsupported: as :func:`session_exclusive`.

    >>> with engine.connect() as connection:
    ...     connection.execute(sl.lock.session_exclusive("nightly"))
    ...     print(connection.scalar(sl.lock.session_unlock("nightly")))
    <...>
    True
    """
    return Operation(_UNLOCK, {"lock_key": as_key(name)})

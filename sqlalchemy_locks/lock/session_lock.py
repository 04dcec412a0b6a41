"""The server's own session locks: held by a connection, across transactions, until unlocked or returned to the pool.

PostgreSQL's ``pg_advisory_lock`` and MySQL's and MariaDB's ``GET_LOCK``. An ORM session returns its connection to the
pool at each commit, and the next checkout would get the connection with its locks. Therefore these operations run on a
``Connection``, or on a session bound to one, and the pool releases the locks when the connection returns.
"""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import Integer, bindparam, event, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, behind_pooler
from sqlalchemy_locks.core.typing import BOOL_ROW, NONE_ROW, shaped
from sqlalchemy_locks.dialects.base import not_writable
from sqlalchemy_locks.errors import LockTimeout, Unsupported
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.sql.elements import LOCK_KEY, ReleaseSessionLocks, SessionLock, SessionUnlock

_RELEASE = "sqlalchemy_locks.release"
#: seconds, where GET_LOCK needs a limit
_YEAR = 31_536_000


class _SessionOperation(OperationImpl):
    held_by = "connection"
    needs_installation = False

    def check_connection(self, execution: Execution) -> None:
        if execution.session is not None and not isinstance(
            execution.session.get_bind(**execution.bind_arguments), Connection
        ):
            raise Unsupported(
                f"{self.name} belongs to a connection, and a session returns its own at each commit, "
                "still locked: execute it on a Connection, or on a session bound to one"
            )
        if (why := execution.server.no_advisory_locks) is not None:
            raise Unsupported(f"{self.name} is an advisory lock, and {why}, or use lock.exclusive")
        if behind_pooler(execution.connection):
            raise Unsupported(
                f"{self.name} locks a session of the server, and a pooler such as PgBouncer is in between, which may "
                "give the next transaction another session: use lock.exclusive, which ends with the transaction; or, "
                "if the pooler is in session mode, set the engine's execution option locks_session_pooling=True"
            )
        execution.refuse_cluster()

    def ask(self, execution: Execution, values: dict[str, Any]) -> Any:
        """Execute the statement, and return the server's answer."""
        statement = self.statement(execution.context)
        assert statement is not None
        try:
            return execution.execute(statement, values).scalar()
        except CompileError as error:  # SQLite's
            raise Unsupported(str(error)) from error


class _SessionLock(_SessionOperation):
    name = "lock.session_exclusive"
    wait_limit = "setting"

    def build(self, context: BuildContext) -> Executable | None:
        return select(SessionLock(LOCK_KEY, bindparam("seconds", _YEAR, type_=Integer())))

    def run(self, execution: Execution) -> None:
        seconds = _YEAR if execution.wait is None else math.ceil(min(execution.wait, _YEAR))
        try:
            answer = self.ask(execution, {**execution.values, "seconds": seconds})
        except LockTimeout:
            _release_on_return(execution.connection)  # YugabyteDB may have granted it nevertheless
            raise
        if answer == "refused":
            raise not_writable(execution.backend.name)
        # None: the server stopped waiting, because the statement was killed or reached its own time limit
        if answer in ("0", None):
            raise LockTimeout("it was not free in time")
        _release_on_return(execution.connection)


class _SessionUnlock(_SessionOperation):
    name = "lock.session_unlock"

    def build(self, context: BuildContext) -> Executable | None:
        return select(SessionUnlock(LOCK_KEY))

    def run(self, execution: Execution) -> Any:
        return bool(self.ask(execution, execution.values))


def _release_on_return(connection: Connection) -> None:
    """Make the pool release the locks of this connection before its next checkout."""
    connection.info[_RELEASE] = str(select(ReleaseSessionLocks()).compile(dialect=connection.dialect))
    pool = connection.engine.pool
    # not event.contains(): it identifies a pool by its address, which a collected pool may have had
    if _on_reset not in pool.dispatch.reset:
        event.listen(pool, "reset", _on_reset)


def _on_reset(dbapi_connection: Any, record: Any, reset_state: Any) -> None:
    # no release: a detached connection is closed, and a terminated one loses its locks
    if record is None or reset_state.terminate_only:
        return
    release = record.info.pop(_RELEASE, None)
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


@shaped(NONE_ROW)
def session_exclusive(name: str | int) -> Operation[Any]:
    """Wait for a lock that this connection holds across transactions, until unlocked, closed or returned to the pool.

    :param name: as in :func:`sqlalchemy_locks.lock.exclusive`. On PostgreSQL and YugabyteDB it is the same lock as
        ``lock.exclusive`` of that name (unless the table bodies are installed); elsewhere it is a separate one.
    :return: ``None``, once it is held. Each further call needs a further unlock.
    :raises Unsupported: on SQLite; in a session that isn't bound to a ``Connection``; through a pooler; on a YugabyteDB
        that is configured to grant advisory locks without acquiring them.
    :raises LockTimeout: the option ``locks_wait`` (seconds; whole ones on MySQL and MariaDB) ended the wait.
    :raises NotWritable: on a standby or replica.

    It is refused through PgBouncer, whose transaction mode may run a connection's next transaction in another session;
    the engine's execution option ``locks_session_pooling=True`` allows it, for a pooler in session mode.

    >>> with engine.connect() as connection:
    ...     connection.execute(sl.lock.session_exclusive("nightly"))
    ...     connection.execute(sl.lock.session_unlock("nightly"))
    """
    return Operation(_LOCK, {"lock_key": as_key(name), "lock_name": name})


@shaped(BOOL_ROW)
def session_unlock(name: str | int) -> Operation[Any]:
    """Release a lock of :func:`session_exclusive`.

    :return: ``True`` when this connection held it, ``False`` when it didn't.
    :raises Unsupported: as :func:`session_exclusive`.

    >>> with engine.connect() as connection:
    ...     connection.execute(sl.lock.session_exclusive("nightly"))
    ...     print(connection.scalar(sl.lock.session_unlock("nightly")))
    <...>
    True
    """
    return Operation(_UNLOCK, {"lock_key": as_key(name)})

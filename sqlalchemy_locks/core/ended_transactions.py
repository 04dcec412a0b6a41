"""Transactions that the server has ended because of an error, which the app's code may ignore.

On InnoDB a deadlock, a full lock table or a conflict with another node of a cluster ends the whole transaction. The
server then continues in another transaction, without the locks and without a further error: the app's COMMIT would
commit the statements that follow. SQLite does the same after ON CONFLICT ROLLBACK, or when the disk is full. PostgreSQL
refuses all further statements, but asyncpg doesn't report that the transaction has failed.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, ExceptionContext, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import LockLost, Unsupported

#: transactions that the server has rolled back and continued in another one, which the driver doesn't know
rolled_back_transactions: WeakSet[RootTransaction] = WeakSet()
#: transactions of blocks that have failed on the server, which the driver doesn't know
failed_transactions: WeakSet[RootTransaction] = WeakSet()
#: transactions in which operations took effect, and the error's text for the statement that ends one; ``None``: only
#: its COMMIT raises
_with_locks: WeakKeyDictionary[RootTransaction, str | None] = WeakKeyDictionary()
#: transactions whose savepoints are refused, and the name of their cluster
_without_savepoints: WeakKeyDictionary[RootTransaction, str | None] = WeakKeyDictionary()
ROLLED_BACK = (
    "has rolled this transaction back for an earlier error, and released every lock that it held: roll it back here, "
    "too, and run it again"
)


def note_end(context: ExceptionContext) -> LockLost | None:
    """Note that an error has ended its transaction; return the error to raise instead, if any."""
    error, connection = context.sqlalchemy_exception, context.connection
    if connection is None or context.is_disconnect or not isinstance(error, DBAPIError):
        return None
    transaction, backend = connection.get_transaction(), backend_for(context.dialect)
    if transaction is None or not backend.ends_transaction(error, connection):
        return None
    if backend.single_writer and transaction not in _with_locks:
        return None  # it may not have begun
    rolled_back_transactions.add(transaction)
    if transaction in _with_locks and _refuse_commit not in connection.dispatch.commit:
        event.listen(connection, "commit", _refuse_commit)
    why = _with_locks.get(transaction)
    return None if why is None else LockLost(why)


def note_failure(context: ExceptionContext) -> None:
    """Note that an error of asyncpg's, outside of a savepoint, has made the transaction of a block fail."""
    connection, error = context.connection, context.original_exception
    # only errors of the server have a severity; if asyncpg refuses to send a statement, the transaction hasn't failed
    answered = getattr(error.__cause__, "severity", None) is not None
    if connection is not None and answered and not connection.in_nested_transaction():
        transaction = connection.get_transaction()
        if transaction is not None and transaction in _with_locks:
            failed_transactions.add(transaction)


def _refuse_commit(connection: Connection) -> None:
    """Refuse the COMMIT of an app that has ignored the error, and has continued without the lock."""
    if (transaction := connection.get_transaction()) in rolled_back_transactions and transaction in _with_locks:
        connection.invalidate()  # SQLAlchemy sends no ROLLBACK after a COMMIT that failed
        raise LockLost(f"COMMIT: the server {ROLLED_BACK}")


def lost_when_ended(connection: Connection, why: str | None) -> None:
    """Raise ``LockLost(why)`` for the statement with which the server rolls the connection's transaction back.

    :param why: ``None``: only a COMMIT after that statement raises.
    """
    transaction = connection.get_transaction() or connection.begin()
    _with_locks[transaction] = _with_locks.get(transaction) or why


def forbid_savepoints(connection: Connection, cluster: str | None) -> None:
    """Refuse the savepoints of a connection until its transaction ends, except those that the app sends as text."""
    if (transaction := connection.get_transaction() or connection.begin()) not in _without_savepoints:
        _without_savepoints[transaction] = cluster
        # not event.contains(): it identifies a connection by its address, which a collected one may have had
        if _refuse_savepoint not in connection.dispatch.savepoint:
            event.listen(connection, "savepoint", _refuse_savepoint)


def _refuse_savepoint(connection: Connection, name: str | None) -> None:
    transaction = connection.get_transaction()
    if transaction is not None and transaction in _without_savepoints:
        raise Unsupported(
            "begin_nested() in a transaction with locks, mutexes, permits or jobs, on a node of "
            f"{_without_savepoints[transaction]}: where another node was the first to commit, MySQL would go on "
            "in another transaction, without them, and without an error; leave it out"
        )

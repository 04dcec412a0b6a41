"""Transactions that a server has ended for an error, and the app's code that passes over it.

On InnoDB a deadlock, a full lock table or a conflict with another node of a cluster ends the whole transaction. The
server then goes on in another one, without the locks and without a word: what follows would be committed by the app's
COMMIT. So does SQLite after ON CONFLICT ROLLBACK, or with a full disk. PostgreSQL refuses all that follows, but asyncpg
doesn't tell that the transaction has failed.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, ExceptionContext, RootTransaction
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import LockLost, Unsupported

#: transactions that the server has rolled back, to go on in another one, where its driver doesn't know
rolled_back_transactions: WeakSet[RootTransaction] = WeakSet()
#: transactions of blocks that the server has failed, where its driver doesn't know
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
    """Note that an error has ended its transaction; return what is raised instead of it, if anything."""
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
    """Note that an error has failed the transaction of a block, outside of a savepoint, where asyncpg has raised it."""
    connection, error = context.connection, context.original_exception
    # only the server's errors have it: what asyncpg refuses to send fails nothing
    answered = getattr(error.__cause__, "severity", None) is not None
    if connection is not None and answered and not connection.in_nested_transaction():
        transaction = connection.get_transaction()
        if transaction is not None and transaction in _with_locks:
            failed_transactions.add(transaction)


def _refuse_commit(connection: Connection) -> None:
    """Refuse what was done without the lock, in another transaction, by an app that has passed over the error."""
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
    """Refuse the savepoints of a connection from now on until its transaction ends; text of the app's passes."""
    if (transaction := connection.get_transaction() or connection.begin()) not in _without_savepoints:
        _without_savepoints[transaction] = cluster
        # not event.contains(), which identifies a connection by its address, where a collected one may have been
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

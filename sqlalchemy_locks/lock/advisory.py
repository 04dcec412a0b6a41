"""``lock.exclusive``, ``shared``, ``try_exclusive``, ``try_shared``, ``unlock``, ``vacuum`` and ``create``.

On PostgreSQL and YugabyteDB each is one call of a function that the migration installs (``FunctionLocks``). Other kinds
of engines have files of their own: ``innodb.py``, ``write_lock.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Boolean, Integer, bindparam, false, select, true
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, NONE_ROW, shaped
from sqlalchemy_locks.dialects import Backend
from sqlalchemy_locks.errors import LockTimeout
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.lock.innodb import RowLocks
from sqlalchemy_locks.lock.key_locks import LOCK_KEY, KeyLocks, LockMode
from sqlalchemy_locks.lock.write_lock import WriteLock
from sqlalchemy_locks.sql.elements import LockFunction, Void

#: of the functions that wait: how long, in milliseconds
_WAIT = bindparam("wait_ms", None, Integer())


class FunctionLocks(KeyLocks):
    """Locks on keys where the database has functions for them."""

    def acquire_statement(self, context: BuildContext, mode: LockMode) -> Executable | None:
        return select(_call(mode))

    def acquire(self, execution: Execution, mode: LockMode, statement: Executable | None) -> bool | None:
        assert statement is not None
        wait = None if execution.wait is None else execution.backend.wait_value(execution.wait)
        held: bool | None = execution.execute(statement, {**execution.values, "wait_ms": wait}).scalar()
        return held if mode.tries else None

    def unlock_statement(self) -> Executable:
        return select(LockFunction("unlock", LOCK_KEY, type_=Void()))

    def vacuum_statement(self) -> Executable | None:
        return select(LockFunction("vacuum", type_=BigInteger()))

    def create_statement(self) -> Executable | None:
        return select(LockFunction("create", bindparam("keys", type_=ARRAY(BigInteger())), type_=Integer()))


def _call(mode: LockMode) -> LockFunction:
    name = f"{'try_' if mode.tries else ''}{'shared' if mode.shared else 'exclusive'}"
    allow_stale = true() if mode.allow_stale else false()
    if mode.tries:
        return LockFunction(name, LOCK_KEY, allow_stale, type_=Boolean())
    return LockFunction(name, LOCK_KEY, allow_stale, _WAIT, type_=Void())


@cache
def _key_locks(backend: Backend) -> KeyLocks:
    """Return how an engine locks keys."""
    if backend.key_rows:
        return RowLocks()
    return WriteLock() if backend.single_writer else FunctionLocks()


class _AcquireLock(OperationImpl):
    """The four ways to acquire a key."""

    held_by = "transaction"

    def __init__(self, mode: LockMode) -> None:
        super().__init__()
        self.mode = mode
        self.name = f"lock.{'try_' if mode.tries else ''}{'shared' if mode.shared else 'exclusive'}"

    def build(self, context: BuildContext) -> Executable | None:
        return _key_locks(context.backend).acquire_statement(context, self.mode)

    def multi_statement_reason(self, context: BuildContext) -> str:
        return _key_locks(context.backend).acquire_needs

    def run(self, execution: Execution) -> Any:
        mode = self.mode
        if execution.wait == 0 and not mode.tries:
            # a server's own limit may have no zero, and ends the transaction
            if not _ACQUIRE[mode._replace(tries=True)].run(execution):
                raise LockTimeout(f"{self.name}: the key {execution.values['lock_key']} is locked (locks_wait=0)")
            return None
        context = execution.context
        return _key_locks(context.backend).acquire(execution, mode, self.statement(context))


class _Unlock(OperationImpl):
    writes = False
    name = "lock.unlock"

    def build(self, context: BuildContext) -> Executable | None:
        return _key_locks(context.backend).unlock_statement()


class _Vacuum(OperationImpl):
    writes = False
    name = "lock.vacuum"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        return _key_locks(context.backend).vacuum_statement()

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "where the unlocked rows are selected first, in batches"

    def run(self, execution: Execution) -> Any:
        if self.statement(execution.context) is not None:
            return super().run(execution)
        return _key_locks(execution.backend).vacuum(execution)


class _CreateKeys(OperationImpl):
    writes = False
    name = "lock.create"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        return _key_locks(context.backend).create_statement()

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "where existing keys are selected first, and left alone"

    def run(self, execution: Execution) -> Any:
        if self.statement(execution.context) is not None:
            return super().run(execution)
        return _key_locks(execution.backend).create(execution)


_ACQUIRE = {
    mode: _AcquireLock(mode)
    for mode in (
        LockMode(shared, tries, stale) for shared in (False, True) for tries in (False, True) for stale in (False, True)
    )
}
_UNLOCK, _VACUUM, _CREATE = _Unlock(), _Vacuum(), _CreateKeys()


@shaped(NONE_ROW)
def exclusive(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Wait for a key and hold it exclusively until the transaction ends.

    :param name: an ``int`` is the key itself (signed 64 bits), a ``str`` is hashed to one by :func:`key`.
    :param allow_stale: PostgreSQL and YugabyteDB refuse under REPEATABLE READ and SERIALIZABLE, where the
        snapshot is older than the lock; ``True`` acquires the lock all the same. Without effect elsewhere:
        on MySQL and MariaDB lock before you read when not in READ COMMITTED.
    :return: ``None``, once it is held. A transaction that holds the key already acquires it again immediately.
    :raises LockTimeout: the database's own limit, or the option ``locks_wait`` (seconds), ended the wait.
    :raises StaleSnapshot: see ``allow_stale``. :raises NotWritable: on a standby or in a read-only transaction.
    :raises MustRollback: this transaction has read, and since then, on SQLite, another one has written, or, on MariaDB
        with ``innodb_snapshot_isolation=ON`` outside READ COMMITTED, the key was used for the first time.

    On SQLite every key is the database's one write lock. On MySQL and MariaDB a second connection, which the engine
    keeps beside its pool, commits the row of a brand-new key.

    >>> with Session(engine) as session, session.begin():
    ...     session.execute(sl.lock.exclusive("invoice:42"))
    """
    return Operation(_ACQUIRE[LockMode(False, False, allow_stale)], {"lock_key": as_key(name)})


@shaped(NONE_ROW)
def shared(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Wait for a key and hold it together with other sharers, against exclusive holders, until the transaction ends.

    Parameters and errors as :func:`exclusive`. Where PostgreSQL has the table bodies, the transaction that shares a new
    key holds it exclusively until it commits: :func:`create` inserts keys in advance. On SQLite sharers exclude one
    another, like every lock there.

    >>> session.execute(sl.lock.shared("prices"))
    """
    return Operation(_ACQUIRE[LockMode(True, False, allow_stale)], {"lock_key": as_key(name)})


@shaped(BOOL_ROW)
def try_exclusive(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Acquire a key exclusively until the transaction ends if it is free; never wait.

    Parameters and errors as :func:`exclusive`.

    :return: ``True`` when it is held now, ``False`` when another transaction holds it, or is acquiring it.

    On MySQL and MariaDB outside READ COMMITTED each try uses the second connection of :func:`exclusive`.

    >>> session.scalar(sl.lock.try_exclusive("invoice:42"))
    True
    """
    return Operation(_ACQUIRE[LockMode(False, True, allow_stale)], {"lock_key": as_key(name)})


@shaped(BOOL_ROW)
def try_shared(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """As :func:`try_exclusive`, together with other sharers (see :func:`shared` for new keys).

    >>> session.scalar(sl.lock.try_shared("prices"))
    True
    """
    return Operation(_ACQUIRE[LockMode(True, True, allow_stale)], {"lock_key": as_key(name)})


@shaped(NONE_ROW)
def unlock(name: str | int) -> Operation[Any]:
    """Say that a key is no longer needed; it is free when the transaction ends.

    There is no unlocking before that: what was done under the lock is not visible to other transactions. PostgreSQL's
    table bodies and YugabyteDB delete the row of the key unless other transactions share it; elsewhere nothing is done.

    >>> session.execute(sl.lock.exclusive("invoice:42"))
    >>> session.execute(sl.lock.unlock("invoice:42"))
    >>> session.commit()
    """
    return Operation(_UNLOCK, {"lock_key": as_key(name)})


@shaped(INT_ROW)
def vacuum() -> Operation[Any]:
    """Delete every key that no transaction holds from the table.

    :return: how many were deleted. Always 0 on PostgreSQL (without the table bodies) and SQLite, which store none.

    Run it with ``locks.run(sl.lock.vacuum())``: the deleted keys stay locked until the transaction ends, and a try
    (``timeout=0``) of one of them may be refused meanwhile. On MySQL and MariaDB it spares keys that were first used
    less than a minute ago, and commits by itself, on the second connection of :func:`exclusive`.

    >>> locks.run(sl.lock.vacuum())
    0
    """
    return Operation(_VACUUM, {})


@shaped(INT_ROW)
def create(*names: str | int) -> Operation[Any]:
    """Insert keys into the table before their first use: with PostgreSQL's table bodies, the first sharers then share.

    :param names: as in :func:`exclusive`, at least one.
    :return: how many were new. Always 0 on PostgreSQL (without the table bodies) and SQLite, which need none.

    Commit before other transactions use them: until then this transaction holds the new ones, except on MySQL and
    MariaDB, where they are committed at once.

    >>> locks.run(sl.lock.create("prices", "invoice:42"))
    0
    """
    if not names:
        raise ValueError("lock.create needs at least one name")
    # in one order for every caller: two that create the same keys then can't deadlock
    return Operation(_CREATE, {"keys": sorted({as_key(name) for name in names})})

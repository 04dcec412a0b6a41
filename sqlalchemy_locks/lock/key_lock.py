"""``lock.exclusive``, ``shared``, ``try_exclusive``, ``try_shared``, ``unlock``, ``vacuum`` and ``create``.

On PostgreSQL and YugabyteDB each is one call of a function that the migration installs. Other kinds of engines have
files of their own: ``innodb.py``, ``write_lock.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ARRAY, BigInteger, Boolean, Integer, bindparam, false, literal_column, null, select, true
from sqlalchemy.sql import Executable
from sqlalchemy.types import NullType

from sqlalchemy_locks._validation import milliseconds
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, write_nothing
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, NONE_ROW, shaped
from sqlalchemy_locks.errors import LockTimeout
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.lock import innodb, write_lock
from sqlalchemy_locks.lock.key_holders import holders_now
from sqlalchemy_locks.sql.elements import LOCK_KEY, WAIT_MS, LockFunction
from sqlalchemy_locks.values import Holder


class _Mode(NamedTuple):
    """How a key is acquired."""

    shared: bool = False
    #: acquire it only if it is free
    tries: bool = False
    #: acquire it even where the snapshot is older than the lock
    allow_stale: bool = False


class _AcquireLock(OperationImpl):
    """The four ways to acquire a key."""

    held_by = "transaction"
    wait_limit = "argument"
    uses_nonce = False

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode
        self.function = f"{'try_' if mode.tries else ''}{'shared' if mode.shared else 'exclusive'}"
        self.name = f"lock.{self.function}"

    def build(self, context: BuildContext) -> Executable | None:
        mode = self.mode
        if not context.backend.schemas:
            waits_for_file = context.backend.single_writer and not mode.tries
            return write_nothing(context.tables.locked_keys) if waits_for_file else None
        allow_stale = true() if mode.allow_stale else false()
        if mode.tries:
            return select(LockFunction(self.function, LOCK_KEY, allow_stale, type_=Boolean()))
        return select(LockFunction(self.function, LOCK_KEY, allow_stale, WAIT_MS, type_=NullType()))

    def check_connection(self, execution: Execution) -> None:
        super().check_connection(execution)
        if self.mode.shared:
            # a shared lock changes no row, so an exclusive lock on another node would not conflict with it
            execution.refuse_cluster()

    def multi_statement_reason(self, context: BuildContext) -> str:
        if context.backend.single_writer:
            return "where the busy timeout is set to zero around it"
        return "where the row of a new key is committed first, by another connection"

    def holders(self, execution: Execution) -> tuple[Holder, ...]:
        # On InnoDB the transaction continues after a timeout, and can read the holders; elsewhere that would need
        # another connection. The operation of a block has no name: the block itself reads the holders.
        readable = execution.backend.key_rows and execution.wait != 0 and "lock_name" in execution.values
        return holders_now(execution.connection, [execution.values["lock_name"]]) if readable else ()

    def run(self, execution: Execution) -> Any:
        mode, backend = self.mode, execution.backend
        if execution.wait == 0 and not mode.tries:
            # not by a server's own limit, which may have no zero, and whose error ends the transaction
            if not _acquire_in(mode._replace(tries=True)).run(execution):
                raise LockTimeout("it is locked, and there was no time to wait")
            return None
        if backend.key_rows:
            return innodb.acquire(execution, shared=mode.shared, tries=mode.tries)
        if backend.single_writer:
            return write_lock.try_acquire(execution) if mode.tries else write_lock.acquire(execution)
        statement = self.statement(execution.context)
        assert statement is not None
        values = {**execution.values, WAIT_MS.key: milliseconds(execution.wait)}
        held: bool | None = execution.execute(statement, values).scalar()
        return held if mode.tries else None


class _Unlock(OperationImpl):
    writes = False
    name = "lock.unlock"

    def build(self, context: BuildContext) -> Executable | None:
        # other engines have no row to remove
        return select(LockFunction("unlock", LOCK_KEY, type_=NullType()) if context.backend.schemas else null())

    def run(self, execution: Execution) -> None:
        super().run(execution).close()


class _KeysOperation(OperationImpl):
    """An operation on the table of keys, where there is one; its value is a number of keys."""

    writes = False

    def __init__(
        self, name: str, function: LockFunction, reason: str, run_on_innodb: Callable[[Execution], int]
    ) -> None:
        super().__init__()
        self.name = name
        self._function, self._reason, self._run_on_innodb = function, reason, run_on_innodb

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        if context.backend.key_rows:
            return None
        return select(self._function if context.backend.schemas else literal_column("0"))

    def multi_statement_reason(self, context: BuildContext) -> str:
        return self._reason

    def run(self, execution: Execution) -> Any:
        return self._run_on_innodb(execution) if execution.backend.key_rows else super().run(execution)


_acquire_in = cache(_AcquireLock)
_UNLOCK = _Unlock()
_VACUUM = _KeysOperation(
    "lock.vacuum",
    LockFunction("vacuum", type_=BigInteger()),
    "where the unlocked rows are selected first, in batches",
    innodb.vacuum,
)
_CREATE = _KeysOperation(
    "lock.create",
    LockFunction("create", bindparam("keys", type_=ARRAY(BigInteger())), type_=Integer()),
    "where existing keys are selected first, and left alone",
    innodb.create,
)


def acquire(key: int, *, shared: bool) -> Operation[Any]:
    """Return the acquisition of a key, for a block."""
    return Operation(_acquire_in(_Mode(shared=shared)), {"lock_key": key})


def _named(name: str | int, **mode: bool) -> Operation[Any]:
    return Operation(_acquire_in(_Mode(**mode)), {"lock_key": as_key(name), "lock_name": name})


@shaped(NONE_ROW)
def exclusive(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Wait for a key and hold it exclusively until the transaction ends.

    :param name: an ``int`` is the key itself (signed 64 bits), a ``str`` is hashed to one by :func:`key`.
    :param allow_stale: under REPEATABLE READ and SERIALIZABLE, PostgreSQL and YugabyteDB refuse the lock, since the
        snapshot is older than it; ``True`` acquires it nevertheless. It has no effect on other engines. On MySQL and
        MariaDB, lock before you read unless the level is READ COMMITTED.
    :return: ``None``, once it is held. A transaction that holds the key already acquires it again immediately.
    :raises LockTimeout: the database's own limit, or the option ``locks_wait`` (seconds), ended the wait.
    :raises StaleSnapshot: see ``allow_stale``. :raises NotWritable: on a standby or in a read-only transaction.
    :raises MustRollback: this transaction has read, and since then another one has written (SQLite); the server has
        rolled it back, for a deadlock or, with ``innodb_snapshot_isolation=ON``, a newer row (MySQL, MariaDB).

    On SQLite every key is the database's one write lock. On MySQL and MariaDB a second connection, which the engine
    keeps beside its pool, commits the row of a brand-new key.

    In a cluster in which several nodes accept writes (Galera, Group Replication with several primaries), each node
    grants the lock. Of several holders, only the first one can commit. In each other holder, the next statement or the
    COMMIT raises ``LockLost``, and nothing is committed. So the lock guards the writes of the transaction; for work
    outside the database, use a lease.

    >>> with Session(engine) as session, session.begin():
    ...     session.execute(sl.lock.exclusive("invoice:42"))
    """
    return _named(name, allow_stale=allow_stale)


@shaped(NONE_ROW)
def shared(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Wait for a key and hold it together with other sharers, against exclusive holders, until the transaction ends.

    Parameters and errors as :func:`exclusive`; in a cluster as described there it is ``Unsupported``, unless the engine
    has the execution option ``locks_one_node=True``. Where PostgreSQL has the table bodies, the transaction that shares
    a new key holds it exclusively until it commits: :func:`create` inserts keys in advance. On SQLite sharers exclude
    one another, like every lock there.

    >>> session.execute(sl.lock.shared("prices"))
    """
    return _named(name, shared=True, allow_stale=allow_stale)


@shaped(BOOL_ROW)
def try_exclusive(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Acquire a key exclusively until the transaction ends if it is free; never wait.

    Parameters and errors as :func:`exclusive`.

    :return: ``True`` when it is held now, ``False`` when another transaction holds it, or is acquiring it.

    On MySQL and MariaDB outside READ COMMITTED each try uses the second connection of :func:`exclusive`.

    >>> session.scalar(sl.lock.try_exclusive("invoice:42"))
    True
    """
    return _named(name, tries=True, allow_stale=allow_stale)


@shaped(BOOL_ROW)
def try_shared(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """As :func:`try_exclusive`, together with other sharers (see :func:`shared` for new keys).

    >>> session.scalar(sl.lock.try_shared("prices"))
    True
    """
    return _named(name, shared=True, tries=True, allow_stale=allow_stale)


@shaped(NONE_ROW)
def unlock(name: str | int) -> Operation[Any]:
    """Say that a key is no longer needed; it is free when the transaction ends.

    It isn't free before, since other transactions don't see yet what this one has written under the lock. PostgreSQL's
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

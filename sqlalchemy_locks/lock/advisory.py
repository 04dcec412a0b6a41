"""Advisory-style locks: any value can be locked, exclusively or shared, until the transaction ends.

The pattern: exclusive and shared locks on arbitrary values, as functions over a table of keys
(``lock.exclusive``, ``lock.shared``, ``lock.unlock``, ``lock.vacuum``), with its races mended.

What is promised: two transactions never hold a key exclusively at once, nor one exclusively and another
shared; ``try_*`` never waits, whatever others have not committed yet; a lock ends with its transaction, its
connection or its process, whichever ends first.

- *PostgreSQL, YugabyteDB*: one call of the functions that the migration installs.
- *MySQL, MariaDB*: the row of the key in a table (``lock/innodb.py``), made on its first use.
- *SQLite*: any lock is the database's one write lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Delete,
    Integer,
    bindparam,
    delete,
    false,
    func,
    literal,
    literal_column,
    null,
    select,
)
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, shaped
from sqlalchemy_locks.errors import LockTimeout
from sqlalchemy_locks.keys import as_key, key
from sqlalchemy_locks.lock import innodb
from sqlalchemy_locks.lock.holders import holders
from sqlalchemy_locks.lock.row import row
from sqlalchemy_locks.lock.session import session_exclusive, session_unlock
from sqlalchemy_locks.sql.elements import LockFunction, Void

__all__ = [
    "create",
    "exclusive",
    "holders",
    "key",
    "row",
    "session_exclusive",
    "session_unlock",
    "shared",
    "try_exclusive",
    "try_shared",
    "unlock",
    "vacuum",
]

_KEY = bindparam("lock_key", type_=BigInteger())


class _AcquireLock(OperationImpl):
    """The four ways to take a key."""

    held_by = "transaction"

    def __init__(self, *, shared: bool, tries: bool, allow_stale: bool) -> None:
        super().__init__()
        self.shared, self.tries, self.allow_stale = shared, tries, allow_stale
        self.function = f"{'try_' if tries else ''}{'shared' if shared else 'exclusive'}"
        self.name = f"lock.{self.function}"
        self._bounded: Executable = self._within(self._call())

    def build(self, context: BuildContext) -> Executable | None:
        match context.backend.locking:
            case "functions":
                return select(self._call())
            case "file":
                return None if self.tries else _take_file(context)
            case "rows":
                if self.tries and context.backend.bounded_insert:
                    return innodb.take(context.tables.locked_keys, self.shared, nowait=True)
                return None

    def because(self, context: BuildContext) -> str:
        if context.backend.locking == "file":
            return "where the busy timeout is none while it runs"
        return "where the key's row is looked for, and made if there is none"

    def run(self, execution: Execution) -> Any:
        if execution.wait == 0 and not self.tries:
            return self._once(execution)
        match execution.backend.locking:
            case "functions":
                if execution.wait is None or self.tries:
                    statement = self.statement(execution.context)
                    assert statement is not None
                    got = execution.scalar(statement, execution.values)
                else:
                    wait = execution.backend.wait_value(execution.wait)
                    got = execution.scalar(self._bounded, {**execution.values, "wait": wait})
                return got if self.tries else None
            case "file":
                return self._file(execution)
            case "rows":
                if self.tries:
                    return innodb.try_acquire(execution, shared=self.shared)
                return innodb.acquire(execution, shared=self.shared)

    def _once(self, execution: Execution) -> None:
        """No wait at all is a try: a server's own limit may have no zero, and would end the transaction."""
        if not _ACQUIRE[self.shared, True, self.allow_stale].run(execution):
            raise LockTimeout(f"{self.name}: the key {execution.values['lock_key']} was not free")

    def _call(self) -> LockFunction:
        arguments = (_KEY, literal(True)) if self.allow_stale else (_KEY,)
        return LockFunction(self.function, *arguments, type_=Boolean() if self.tries else Void())

    def _within(self, call: LockFunction) -> Executable:
        """The call with a bounded wait, in the same round trip, and the setting as it was afterwards.

        Materialised, each over the one before: that is what makes the server go through them in this order.
        """
        setting = "lock_timeout"
        was = select(func.current_setting(setting).label("was")).cte("setting").prefix_with("MATERIALIZED")
        wait = select(was.c.was, func.set_config(setting, bindparam("wait"), True).label("now"))
        wait_cte = wait.cte("bounded").prefix_with("MATERIALIZED")
        held = select(wait_cte.c.was, call.label("held")).cte("held").prefix_with("MATERIALIZED")
        return select(held.c.held).where(func.set_config(setting, held.c.was, True).is_not(None))

    def _file(self, execution: Execution) -> bool | None:
        statement = _take_file(execution.context)
        if self.tries:
            with execution.backend.bounded(execution.connection, 0):
                got = _whether(lambda: execution.execute(statement, {}))
        else:
            with execution.waiting(), execution.backend.judging(execution.connection):
                execution.execute(statement, {})
            got = None
        if got is not False and not execution.backend.began(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)
        return got


class _Unlock(OperationImpl):
    writes = False
    name = "lock.unlock"

    def build(self, context: BuildContext) -> Executable | None:
        match context.backend.locking:
            case "functions":
                return select(LockFunction("unlock", _KEY, type_=Void()))
            case "file":
                return select(null())  # nothing is kept there that would have to be removed
            case "rows":
                return None

    def because(self, context: BuildContext) -> str:
        return "where a row that others share as well must stay"

    def run(self, execution: Execution) -> Any:
        if execution.backend.locking != "rows":
            return super().run(execution)
        innodb.delete_free(execution, innodb.known(execution, [execution.values["lock_key"]]))
        return None


class _Vacuum(OperationImpl):
    writes = False
    name = "lock.vacuum"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        match context.backend.locking:
            case "functions":
                return select(LockFunction("vacuum", type_=BigInteger()))
            case "file":
                return select(literal_column("0"))
            case "rows":
                return None

    def because(self, context: BuildContext) -> str:
        return "where the rows that nobody holds are found first, batch by batch"

    def run(self, execution: Execution) -> Any:
        if execution.backend.locking != "rows":
            return super().run(execution)
        if execution.backend.autocommit(execution.connection):
            raise execution.backend.refuse_autocommit(self.name)
        return innodb.delete_all_free(execution)


class _Create(OperationImpl):
    writes = False
    name = "lock.create"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def build(self, context: BuildContext) -> Executable | None:
        match context.backend.locking:
            case "functions":
                return select(LockFunction("create", bindparam("keys", type_=ARRAY(BigInteger())), type_=Integer()))
            case "file":
                return select(literal_column("0"))
            case "rows":
                return None

    def because(self, context: BuildContext) -> str:
        return "where the keys that are there already are left alone"

    def run(self, execution: Execution) -> Any:
        if execution.backend.locking != "rows":
            return super().run(execution)
        return innodb.make(execution, execution.values["keys"])


def _take_file(context: BuildContext) -> Delete:
    """A write that writes nothing: SQLite takes its write lock when the statement starts, rows or no rows."""
    return delete(context.tables.locked_keys).where(false())


def _whether(attempt: Any) -> bool:
    try:
        attempt()
    except LockTimeout:
        return False
    return True


_ACQUIRE = {
    (shared, tries, stale): _AcquireLock(shared=shared, tries=tries, allow_stale=stale)
    for shared in (False, True)
    for tries in (False, True)
    for stale in (False, True)
}
_UNLOCK, _VACUUM, _CREATE = _Unlock(), _Vacuum(), _Create()


def _acquire(name: str | int, shared: bool, tries: bool, allow_stale: bool) -> Operation[Any]:
    return Operation(_ACQUIRE[shared, tries, allow_stale], {"lock_key": as_key(name)})


@shaped(select(literal(None)))
def exclusive(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Wait for a key and hold it alone until the transaction ends.

    :param name: an ``int`` is the key itself (signed 64 bits), a ``str`` is hashed to one by :func:`key`.
    :param allow_stale: PostgreSQL and YugabyteDB refuse under REPEATABLE READ and SERIALIZABLE, where the
        snapshot is older than the lock; ``True`` takes the lock all the same. Without effect elsewhere:
        on MySQL and MariaDB lock before you read when not in READ COMMITTED.
    :return: ``None``, once it is held. Asked again in the same transaction, it is had at once.
    :raises LockTimeout: the database's own limit, or the option ``locks_wait``, ended the wait.
    :raises StaleSnapshot: see ``allow_stale``. :raises NotWritable: on a standby or in a read-only transaction.
    :raises MustRollback: SQLite, where this transaction has read before and somebody has written since.

    On SQLite every key is the database's one write lock. On MySQL outside READ COMMITTED a key that this engine has not
    met is looked for through a connection of its own, opened and closed for it.

    >>> with Session(engine) as session, session.begin():
    ...     session.execute(sl.lock.exclusive("invoice:42"))
    """
    return _acquire(name, False, False, allow_stale)


@shaped(select(literal(None)))
def shared(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Wait for a key and hold it together with other sharers, against exclusive holders, until the transaction ends.

    Parameters and errors as :func:`exclusive`. On MySQL, MariaDB and where PostgreSQL has the table bodies, the
    transaction that shares a brand-new key holds it alone until it commits: :func:`create` makes keys ahead. On
    SQLite sharers exclude one another, as everything there does.

    >>> session.execute(sl.lock.shared("prices"))
    """
    return _acquire(name, True, False, allow_stale)


@shaped(select(literal(True)))
def try_exclusive(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """Hold a key alone until the transaction ends, if it is free this instant; never wait.

    Parameters and errors as :func:`exclusive`.

    :return: ``True`` when it is held now, ``False`` when another transaction holds it, or is just taking it.

    On MySQL outside READ COMMITTED each try looks for the key, and puts it into the table if it isn't there, through a
    connection of its own, opened and closed for it: looking for an absent row would lock its neighbourhood there.

    >>> session.scalar(sl.lock.try_exclusive("invoice:42"))
    True
    """
    return _acquire(name, False, True, allow_stale)


@shaped(select(literal(True)))
def try_shared(name: str | int, *, allow_stale: bool = False) -> Operation[Any]:
    """As :func:`try_exclusive`, held together with other sharers (see :func:`shared` for brand-new keys).

    >>> session.scalar(sl.lock.try_shared("prices"))
    True
    """
    return _acquire(name, True, True, allow_stale)


@shaped(select(literal(None)))
def unlock(name: str | int) -> Operation[Any]:
    """Remove a key that this transaction holds; it is free for others when the transaction ends.

    Waits for nobody: a key that others share as well stays. PostgreSQL and SQLite keep nothing that would have
    to be removed. There is no unlocking before the end of the transaction: what was done under the lock is not
    visible to others before that.

    >>> session.execute(sl.lock.exclusive("invoice:42"))
    >>> session.execute(sl.lock.unlock("invoice:42"))
    >>> session.commit()
    """
    return Operation(_UNLOCK, {"lock_key": as_key(name)})


@shaped(select(literal(1)))
def vacuum() -> Operation[Any]:
    """Remove every key that nobody holds from the table.

    :return: how many were removed. Always 0 on PostgreSQL (without the table bodies) and SQLite, which keep none.

    Best through ``locks.run(sl.lock.vacuum())``: the removed keys stay locked until the transaction ends.

    >>> locks.run(sl.lock.vacuum())
    0
    """
    return Operation(_VACUUM, {})


@shaped(select(literal(1)))
def create(*names: str | int) -> Operation[Any]:
    """Put keys into the table ahead of their first use, so that even their first sharers share.

    :param names: as in :func:`exclusive`, at least one.
    :return: how many were new. Always 0 on PostgreSQL (without the table bodies) and SQLite, which need none.

    Commit before others use them: until then this transaction holds the new ones.

    >>> locks.run(sl.lock.create("prices", "invoice:42"))
    0
    """
    if not names:
        raise ValueError("lock.create needs at least one name")
    return Operation(_CREATE, {"keys": _sorted_keys(names)})


def _sorted_keys(names: Iterable[str | int]) -> list[int]:
    # in one order for everybody: two callers that make the same keys then can't deadlock
    return sorted({as_key(name) for name in names})

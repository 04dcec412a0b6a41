"""InnoDB: a lock is the lock of a key's row. The row is committed first, by another connection; then it is locked.

A statement that locks a committed row by its primary key locks this one record, and no gap, at every isolation level.
A wait for the row is InnoDB's own, with its queue and its deadlock detection. An uncommitted row has neither advantage:
nobody can share it, and after its rollback its waiters hold a lock of the gap.

1. Look, in the transaction: one SELECT answers whether the server accepts writes and locks the row if it is there.
   Above READ COMMITTED a locking read of an absent row would lock the gap, so there the SELECT reads no row.
2. Commit the row, on a side connection, where it is absent. At READ COMMITTED this INSERT waits for no holder.
3. Lock the row, in the transaction. A call that waits sends an INSERT, which locks a present row as a SELECT does. If a
   vacuum has deleted the row since, the INSERT holds the key by a new row, and locks no gap.

Step 3 alone decides about the lock. Where step 2 could not commit the row, the INSERT of step 3 still excludes others.

In a cluster in which several nodes accept writes, each node grants the lock. An exclusive lock also changes the row: of
several holders, the first one commits, and the cluster rolls the others back.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Insert, Integer, Table, delete, exists, literal_column, null, select
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.ended_transactions import lost_when_ended
from sqlalchemy_locks.core.operation import BuildContext, Execution, translated
from sqlalchemy_locks.core.side_pool import side_connection
from sqlalchemy_locks.dialects.base import COMMITTED, not_writable
from sqlalchemy_locks.errors import LockTimeout, MustRollback, PoolTimeout
from sqlalchemy_locks.sql.clock import SecondsAgo
from sqlalchemy_locks.sql.elements import LOCK_KEY, READ_COMMITTED, TakeRow, Writable

#: the maximum number of keys that one transaction of a vacuum deletes
_MAX_VACUUMED = 100
_LOST = (
    "the server has rolled this transaction back, and released its locks: another one was the first to commit, on this "
    "node of the cluster or on another; roll it back here, too, and run it again"
)
#: seconds for which a vacuum spares a new row, whose owner may be about to lock it
_YOUNG = 60
#: the maximum number of keys that are remembered as committed, for each engine of the app
_MAX_REMEMBERED = 10_000


def acquire(execution: Execution, *, shared: bool, tries: bool) -> bool | None:
    """Acquire the key of an execution.

    :param tries: don't wait for the key.
    :return: whether the key is held, if it ``tries``; otherwise ``None``, once the key is held.
    """
    key = execution.values["lock_key"]
    if execution.server.cluster is not None and not execution.begun_by_locks:  # in Locks, the block does it
        lost_when_ended(execution.connection, _LOST)
    if tries:
        return _try(execution, key, shared)
    with execution.waiting():
        _acquire(execution, key, shared)
    return None


def vacuum(execution: Execution) -> int:
    """Delete every key that no transaction holds, except new ones, in batches of a transaction each.

    :raises Unsupported: in a cluster, where it would end the transactions that hold keys on other nodes.
    """
    execution.refuse_cluster("would end the transactions that hold keys on other nodes", "leave the keys there")
    _require_writable(execution)
    table, deleted = execution.context.tables.locked_keys, 0
    old = select(table.c.key).where(table.c.ts < SecondsAgo(_YOUNG))
    batch = old.order_by(table.c.key).limit(_MAX_VACUUMED)
    with side_connection(execution, row_wait=1) as side:
        keys = list(side.execute(batch).scalars())
        while keys:
            side.exec_driver_sql("START TRANSACTION")
            lockable = old.where(table.c.key.in_(keys)).with_for_update(skip_locked=True)
            free_keys = list(side.execute(lockable).scalars())
            if free_keys:
                # one by one: for several keys the server may scan the table, and wait for rows that others have locked
                parameters = [{"lock_key": key} for key in free_keys]
                side.execute(delete(table).where(table.c.key == LOCK_KEY), parameters)
            side.commit()
            deleted += len(free_keys)
            keys = list(side.execute(batch.where(table.c.key > keys[-1])).scalars())
    _committed(execution).clear()
    return deleted


def create(execution: Execution) -> int:
    """Insert and commit the rows of new keys; return how many keys were new."""
    _require_writable(execution)
    with side_connection(execution) as side:
        return sum(_insert_absent(execution, side, key) for key in execution.values["keys"])


def _acquire(execution: Execution, key: int, shared: bool) -> None:
    """Lock a key, waiting for it."""
    touches = execution.context.cluster is not None and not shared
    if (execution.begun_by_locks and not touches) or not _is_remembered(execution, key):
        row = _lock_present(execution, key, shared)
        if row.locked and not touches:
            return
        if (row.locked or _commit_row(execution, key)) and (touches or not row.read_committed):
            _remember(execution, key)
    statement = _lock_or_insert(execution.context.tables.locked_keys, shared, touches)
    rows = execution.execute(statement, {"lock_key": key}).rowcount
    # 0 rows: the server accepts no writes, or, for a shared lock, the row was present
    if not rows:
        _require_writable(execution)


def _try(execution: Execution, key: int, shared: bool) -> bool:
    """Lock a key if it is free.

    If another transaction is inserting the row, MySQL waits for it for a second, which is its shortest limit.
    """
    try:
        locked = _lock_present(execution, key, shared, nowait=True).locked
        if not locked and _commit_row(execution, key):
            locked = _lock_present(execution, key, shared, nowait=True, at_any_level=True).locked
    except PoolTimeout:
        raise
    except LockTimeout:
        return False
    if locked and execution.context.cluster is not None and not shared:
        execution.execute(_lock_or_insert(execution.context.tables.locked_keys, False, True), {"lock_key": key})
    return bool(locked)


def _lock_present(
    execution: Execution, key: int, shared: bool, *, nowait: bool = False, at_any_level: bool = False
) -> Any:
    """Lock a key's row if there is one, by default not above READ COMMITTED.

    :return: the row of ``_look``.
    :raises NotWritable: where a lock would have no effect.
    """
    at_any_level = at_any_level or execution.begun_by_locks
    statement = _look(execution.context.tables.locked_keys, shared, nowait, at_any_level)
    if not (at_any_level or execution.level in COMMITTED):
        # this SELECT names no table: on MariaDB, one that does creates the snapshot of a SERIALIZABLE transaction
        row: Any = execution.execute(_settings, {}).one()
        if row.writable and not row.read_committed:
            return row
    row = execution.execute(statement, {"lock_key": key}).one()
    if not row.writable:
        raise not_writable(execution.backend.name)
    return row


def _commit_row(execution: Execution, key: int) -> bool:
    """Insert a key's row if it is absent, and commit it.

    :return: ``False`` if another transaction, which has not ended, has inserted the row or locked its gap.
    """
    with side_connection(execution) as side:
        try:
            _insert_absent(execution, side, key)
        except LockTimeout:
            return False
    return True


def _insert_absent(execution: Execution, side: Connection, key: int) -> int:
    """Insert a key's row if it is absent; return how many rows that inserted, 1 or 0."""
    statement = _insert_unless_present(execution.context.tables.locked_keys)
    try:
        with translated(execution.backend, needs_installation=True):
            return side.execute(statement, {"lock_key": key}).rowcount
    except MustRollback as error:  # of the side connection's transaction
        raise LockTimeout(f"another transaction is inserting or deleting the row of key {key}") from error


def _remember(execution: Execution, key: int) -> None:
    """Remember that the row of a key is committed: above READ COMMITTED it can then be locked without step 1."""
    # under a schema_translate_map the next statement's table may be another one
    if not execution.schema_map:
        keys = _committed(execution)
        if len(keys) >= _MAX_REMEMBERED:
            keys.clear()
        keys[execution.context, key] = None


def _is_remembered(execution: Execution, key: int) -> bool:
    return not execution.schema_map and (execution.context, key) in _committed(execution)


def _require_writable(execution: Execution) -> None:
    if not execution.backend.writable(execution.connection):
        raise not_writable(execution.backend.name)


#: keys whose rows were seen committed, of each engine
_committed_keys: WeakKeyDictionary[Dialect, dict[tuple[BuildContext, int], None]] = WeakKeyDictionary()


def _committed(execution: Execution) -> dict[tuple[BuildContext, int], None]:
    return _committed_keys.setdefault(execution.connection.dialect, {})


_settings = select(READ_COMMITTED.label("read_committed"), Writable().label("writable"), null().label("locked"))


@cache
def _look(table: Table, shared: bool, nowait: bool, at_any_level: bool) -> Executable:
    """Return the SELECT that locks a present row, and answers whether the server accepts writes."""
    one = literal_column("1", Integer)
    row = select(one).select_from(table).where(table.c.key == LOCK_KEY, Writable())
    if not at_any_level:
        row = row.where(READ_COMMITTED)
    # an exclusive lock of no row, which a read-only transaction refuses; it would grant a shared lock
    nothing = select(one).select_from(table).where(literal_column("1 = 0")).with_for_update()
    return select(
        READ_COMMITTED.label("read_committed"),
        Writable().label("writable"),
        row.with_for_update(read=shared, nowait=nowait).scalar_subquery().label("locked"),
        nothing.scalar_subquery().label("nothing"),
    )


@cache
def _insert_unless_present(table: Table) -> Insert:
    """Return the INSERT that waits for no holder: at READ COMMITTED the search for the row locks nothing."""
    absent = ~exists(select(table.c.key).where(table.c.key == LOCK_KEY))
    return Insert(table).prefix_with("IGNORE").from_select(["key"], select(LOCK_KEY).where(absent))


@cache
def _lock_or_insert(table: Table, shared: bool, touches: bool) -> Insert:
    """Return the INSERT that locks the row, and inserts it if it is absent.

    :param touches: it changes a row that is present.
    """
    insert = Insert(table).prefix_with("IGNORE") if shared else TakeRow(table, "ts" if touches else None)
    return insert.from_select(["key"], select(LOCK_KEY).where(Writable()))

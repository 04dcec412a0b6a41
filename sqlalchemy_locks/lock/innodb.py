"""InnoDB: a lock is the row of a key. How a transaction finds that row and locks it, or inserts it.

Properties of InnoDB that shape this, each measured:

- At READ COMMITTED a locking read of an absent row locks nothing. At REPEATABLE READ and above it locks the gap around
  it until the transaction ends, and with it the first use of unrelated keys. So every locking read that may find
  nothing is conditional on ``ReadCommitted`` inside the statement, unless the transaction is known to be at that level:
  at other levels it touches no row.
- A transaction that waits for another's uncommitted row, which is then rolled back, is left with a lock on the gap
  when it waits in an INSERT, at any level; when it waits above READ COMMITTED, in any statement; and on MariaDB
  when it waits for a shared lock. So no such wait happens: at READ COMMITTED the wait is in a locking read
  (on MariaDB that of a sharer is an exclusive one), and the INSERT never waits (on MySQL see ``insert_guard.py``).
- Above READ COMMITTED only committed rows are waited for: a side connection in autocommit sees what is committed,
  inserts the row on MySQL, and waits for a transaction that has inserted it and not committed yet.
- INSERT ... ON DUPLICATE KEY UPDATE (exclusive) and INSERT IGNORE (shared) lock the one record of a duplicate,
  and no gap, at any isolation level: above READ COMMITTED they lock, and wait for, a committed row.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

from sqlalchemy import Insert, Select, Table, delete, literal_column, select
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution
from sqlalchemy_locks.errors import LockTimeout, Unsupported
from sqlalchemy_locks.lock.insert_guard import RowState, ensure_row, insert_guard, wait_for_inserter
from sqlalchemy_locks.lock.key_locks import LOCK_KEY, KeyLocks, LockMode
from sqlalchemy_locks.sql.elements import NowaitInsert, NowaitTakeRow, PlainReads, ReadCommitted, TakeRow, Writable

_BATCH = 1000
#: rounds without a row to wait for and without a way to insert one, before the INSERT itself waits
_ROUNDS = 50
#: one-second waits for the insert guard that may fail before that
_GUARD_WAITS = 3
#: keys that an engine of the app remembers as committed
_MAX_REMEMBERED = 10_000
_read_committed = select(ReadCommitted())
_read_committed_and_writable = select(ReadCommitted(), Writable())
_plain_reads = select(PlainReads())


class RowLocks(KeyLocks):
    """Locks on keys where a key is a row of ``locked_keys``."""

    acquire_needs = "where the key's row is looked up, and inserted if it is absent"

    def acquire_statement(self, context: BuildContext, mode: LockMode) -> Executable | None:
        if mode.tries and context.backend.bounded_insert:
            return insert_or_lock(context.tables.locked_keys, mode.shared, nowait=True)
        return None

    def acquire(self, execution: Execution, mode: LockMode, statement: Executable | None) -> bool | None:
        key = execution.values["lock_key"]
        if mode.tries:
            return _try_acquire(execution, key, mode.shared)
        with execution.waiting():
            _acquire(execution, key, mode.shared)
        return None

    def unlock(self, execution: Execution) -> None:
        _delete_unlocked(execution, _existing_keys(execution, [execution.values["lock_key"]]))

    def vacuum(self, execution: Execution) -> int:
        """Delete every key that no transaction holds, in batches."""
        if not execution.read_committed and not execution.execute(_plain_reads, {}).scalar():
            raise Unsupported(
                f"lock.vacuum would lock every key of {execution.backend.name} in a SERIALIZABLE transaction: "
                "use locks.run(sl.lock.vacuum())"
            )
        table = execution.context.tables.locked_keys
        batch = select(table.c.key).order_by(table.c.key).limit(_BATCH)
        deleted, keys = 0, list(execution.execute(batch, {}).scalars())
        while keys:
            deleted += _delete_unlocked(execution, keys)
            keys = list(execution.execute(batch.where(table.c.key > keys[-1]), {}).scalars())
        return deleted

    def create(self, execution: Execution) -> int:
        """Insert the absent ones of the keys, which are sorted."""
        keys = execution.values["keys"]
        absent = sorted(set(keys) - set(_existing_keys(execution, keys)))
        # acquired, so that a transaction that is inserting one is waited for
        return sum(_acquire(execution, key, shared=True) for key in absent)


def _acquire(execution: Execution, key: int, shared: bool) -> int:
    """Lock a key; return how many rows that inserted, 1 or 0."""
    if execution.backend.bounded_insert:
        return _acquire_by_nowait_insert(execution, key, shared)
    return _acquire_by_guarded_insert(execution, key, shared)


def _acquire_by_nowait_insert(execution: Execution, key: int, shared: bool) -> int:
    """MariaDB: an INSERT that doesn't wait; where it fails, a locking read that waits for the other's row."""
    table, values = execution.context.tables.locked_keys, {"lock_key": key}
    at_read_committed: bool | None = execution.read_committed or None
    # the read comes first only where the level is certain: a session's variable doesn't tell of a SET TRANSACTION,
    # and a shared read, unlike an INSERT, is not refused in a read-only transaction
    reads_first = execution.read_committed and not shared
    for _ in range(_ROUNDS):
        if reads_first and _lock_row(execution, key, shared):
            return 0
        inserted = _insert_nowait(execution, key, shared)
        if inserted is not None:
            return inserted
        if at_read_committed is None:
            at_read_committed = bool(execution.execute(_read_committed, {}).scalar())
        reads_first = at_read_committed and not shared
        if not at_read_committed:
            if wait_for_inserter(execution, key):
                return execution.execute(insert_or_lock(table, shared), values).rowcount
        elif shared and _lock_row(execution, key, shared=bool(_existing_keys(execution, [key]))):
            # An uncommitted row is waited for exclusively, and then held exclusively, as a new one is. Unlike an
            # exclusive lock, a shared one is granted even if the server became read-only during the wait.
            if not execution.backend.writable(execution.connection):
                raise execution.backend.not_writable()
            return 0
    return execution.execute(insert_or_lock(table, shared), values).rowcount


def _acquire_by_guarded_insert(execution: Execution, key: int, shared: bool) -> int:
    """MySQL: a locking read that waits; and where there is no row, an INSERT under the guard."""
    table, values = execution.context.tables.locked_keys, {"lock_key": key}
    if (
        not execution.read_committed
        and not execution.schema_translated
        and (execution.context, key) in _committed_keys(execution)
    ):
        settings: Any = execution.execute(_read_committed_and_writable, {}).one()
        at_read_committed, writable = settings
        if not writable:
            raise execution.backend.not_writable()
        if not at_read_committed:
            return execution.execute(insert_or_lock(table, shared), values).rowcount
    inserted = guard_timeouts = 0
    for _ in range(_ROUNDS):
        if _lock_row(execution, key, shared):
            return inserted
        state = None
        with insert_guard(execution, key, seconds=1) as (guarded, at_read_committed):
            if execution.read_committed or at_read_committed:
                rows = _lock_or_insert(execution, key, shared) if guarded else None
                if rows is not None:
                    return rows
            else:
                state = ensure_row(execution, key, may_insert=guarded, within=execution.wait)
        inserted += state is RowState.INSERTED
        guard_timeouts += not guarded
        if state is RowState.UNCOMMITTED:
            own = _lock_row_at_any_level(execution, key, shared)
            if own:
                return inserted
            if own is None:
                break  # it was rolled back just now, and the side connection's INSERT would wait for this transaction
            if wait_for_inserter(execution, key):
                state = RowState.COMMITTED
        if state in (RowState.COMMITTED, RowState.INSERTED):
            _remember_committed(execution, key)
            execution.execute(insert_or_lock(table, shared), values)
            return inserted
        if guard_timeouts == _GUARD_WAITS:
            break
    # No row to wait for, and no way to insert one: a lock on the gap, or a client that sleeps under the guard. An
    # INSERT that waits has InnoDB's queue, its deadlock detection and its time limit.
    return inserted + execution.execute(insert_or_lock(table, shared), values).rowcount


def _lock_row(execution: Execution, key: int, shared: bool, *, nowait: bool = False) -> bool:
    """Lock the row of a key if there is one, waiting for it if need be; never above READ COMMITTED."""
    statement = lock_existing(
        execution.context.tables.locked_keys,
        shared,
        if_read_committed=not execution.read_committed,
        nowait=nowait,
        refuse_read_only=not execution.backend.bounded_insert,
    )
    return execution.execute(statement, {"lock_key": key}).first() is not None


def _lock_row_at_any_level(execution: Execution, key: int, shared: bool) -> bool | None:
    """Lock the row of a key if it is free, or if this transaction has inserted it; never wait.

    It is no plain read before the lock is held, since at REPEATABLE READ the first one is the snapshot of all later
    ones.

    :return: ``None`` if there is no row; above READ COMMITTED this transaction has then locked the gap.
    """
    table = execution.context.tables.locked_keys
    statement = lock_existing(table, shared, if_read_committed=False, if_writable=False, nowait=True)
    try:
        return True if execution.execute(statement, {"lock_key": key}).first() else None
    except LockTimeout:
        return False


def _insert_nowait(execution: Execution, key: int, shared: bool) -> int | None:
    """MariaDB: lock the key if it is free, in one statement; return the rows inserted, ``None`` if it isn't free."""
    statement = insert_or_lock(execution.context.tables.locked_keys, shared, nowait=True)
    try:
        return execution.execute(statement, {"lock_key": key}).rowcount
    except LockTimeout:
        return None


def _try_acquire(execution: Execution, key: int, shared: bool) -> bool:
    """Lock the key if it is free; never wait, or a second for a table that another session alters."""
    if execution.backend.bounded_insert:
        return _insert_nowait(execution, key, shared) is not None
    try:
        if _lock_row(execution, key, shared, nowait=True):
            return True
        with insert_guard(execution, key, seconds=0) as (guarded, at_read_committed):
            if execution.read_committed or at_read_committed:
                # a transaction that has the guard is inserting the row, to hold it
                return guarded and _lock_or_insert(execution, key, shared, tries=True) is not None
            state = ensure_row(execution, key, may_insert=guarded, within=1)
            if state is RowState.ABSENT:
                return False
            # absent: a vacuum has deleted it meanwhile, and to insert it now, with the gap locked, could deadlock
            return _lock_row_at_any_level(execution, key, shared) is True
    except LockTimeout:
        return False


def _lock_or_insert(execution: Execution, key: int, shared: bool, *, tries: bool = False) -> int | None:
    """Under the guard: lock the row, or insert it; return the rows inserted, ``None`` if another transaction has it.

    :param tries: wait a second at most, the shortest limit that the server has, if another transaction is inserting
        the row without the guard: above READ COMMITTED a key that was seen, and deleted since, is inserted so.
    """
    bounded = execution.backend.bounded(execution.connection, 1) if tries else contextlib.nullcontext()
    try:
        if _lock_row(execution, key, shared, nowait=True):
            return 0
        with bounded:
            statement = insert_or_lock(execution.context.tables.locked_keys, shared)
            return execution.execute(statement, {"lock_key": key}).rowcount
    except LockTimeout:
        return None


def _committed_keys(execution: Execution) -> dict[Any, None]:
    """Return the keys whose rows were seen committed: above READ COMMITTED these can be waited for directly."""
    dialect: Any = execution.connection.dialect
    keys: dict[Any, None] = dialect.__dict__.setdefault("_sqlalchemy_locks_committed_keys", {})
    return keys


def _remember_committed(execution: Execution, key: int) -> None:
    if execution.schema_translated:
        return  # schema_translate_map: the next statement's may lead to another schema
    keys = _committed_keys(execution)
    if len(keys) >= _MAX_REMEMBERED:
        keys.clear()
    keys[execution.context, key] = None


def _existing_keys(execution: Execution, keys: list[int]) -> list[int]:
    """Return those of the keys that a read without a lock finds; none under SERIALIZABLE, where every read locks."""
    table = execution.context.tables.locked_keys
    return list(execution.execute(select(table.c.key).where(table.c.key.in_(keys), PlainReads()), {}).scalars())


def _delete_unlocked(execution: Execution, keys: list[int]) -> int:
    """Delete those of the keys that no other transaction holds; never wait, so that sharers don't deadlock.

    :param keys: exist: a locking read of an absent one would lock the gap above READ COMMITTED.
    """
    table = execution.context.tables.locked_keys
    if len(keys) > 1 and not execution.read_committed and not execution.execute(_read_committed, {}).scalar():
        # the server may read several by a scan, which locks the gaps that it passes
        return sum(_delete_unlocked(execution, [key]) for key in keys)
    if not keys:
        return 0
    for key in keys:
        _committed_keys(execution).pop((execution.context, key), None)
    lockable = select(table.c.key).where(table.c.key.in_(keys)).with_for_update(skip_locked=True)
    locked = list(execution.execute(lockable, {}).scalars())
    if locked:
        # one by one: of several, the server may make a scan, hint or no hint, and wait for those that others hold
        execution.execute(delete(table).where(table.c.key == LOCK_KEY), [{"lock_key": key} for key in locked])
    return len(locked)


@cache
def lock_existing(
    table: Table,
    shared: bool,
    *,
    if_read_committed: bool = True,
    if_writable: bool = True,
    nowait: bool = False,
    refuse_read_only: bool = True,
) -> Select[Any]:
    """Return the SELECT that locks an existing row.

    :param if_read_committed: only at READ COMMITTED.
    :param if_writable: only on a server that takes writes.
    :param refuse_read_only: fail in a read-only transaction even for a shared lock, which then names a table for
        update that it never reads.
    """
    statement: Select[Any] = select(literal_column("1")).where(table.c.key == LOCK_KEY)
    if if_read_committed:
        statement = statement.where(ReadCommitted())
    if if_writable:
        statement = statement.where(Writable())
    if not (shared and refuse_read_only):
        return statement.select_from(table).with_for_update(read=shared, nowait=nowait)
    none = table.alias("written")
    joined = statement.select_from(table.outerjoin(none, literal_column("1 = 0")))
    return joined.with_for_update(read=True, nowait=nowait, of=table).suffix_with("FOR UPDATE OF written")


@cache
def insert_or_lock(table: Table, shared: bool, *, nowait: bool = False) -> Insert:
    """Return the INSERT that locks the row, or inserts it; a new row is locked exclusively in either case."""
    if shared:
        return (NowaitInsert if nowait else Insert)(table).prefix_with("IGNORE").values(key=LOCK_KEY)
    return (NowaitTakeRow if nowait else TakeRow)(table).values(key=LOCK_KEY)

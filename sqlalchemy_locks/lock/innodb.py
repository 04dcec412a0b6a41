"""InnoDB: a lock is the row of a key. How a transaction finds that row and holds it, or makes it.

Facts of InnoDB that shape this, each measured:

- At READ COMMITTED a look at an absent row locks nothing. At REPEATABLE READ and above it locks the gap around
  it until the transaction ends, and with it the first use of unrelated keys. So every look that may find
  nothing is guarded by ``ReadCommitted`` inside the statement, unless the transaction is known to be at that level:
  elsewhere it touches no row.
- A transaction that waits for another's uncommitted row, which is then rolled back, is left with a lock on the gap
  when it waits in an INSERT, at any level; when it waits above READ COMMITTED, in whatever statement; and on MariaDB
  when it waits for a shared lock. So nothing of the kind waits there: at READ COMMITTED one waits in a look
  (on MariaDB a sharer in an exclusive one), and the INSERT never waits (on MySQL see ``innodb_gate.py``).
- Above READ COMMITTED one waits for committed rows only: a connection beside, in autocommit, sees what is committed,
  makes the row on MySQL, and waits for the one who is just making it.
- INSERT ... ON DUPLICATE KEY UPDATE (exclusive) and INSERT IGNORE (shared) lock the one record of a duplicate,
  and no gap, at any isolation: above READ COMMITTED they hold, and wait for, a committed row.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Insert, Select, Table, bindparam, delete, literal_column, select

from sqlalchemy_locks.core.operation import Execution
from sqlalchemy_locks.errors import LockTimeout, Unsupported
from sqlalchemy_locks.lock.innodb_gate import Presence, insert_guard, make_present, until_decided
from sqlalchemy_locks.sql.elements import NowaitInsert, NowaitTakeRow, PlainReads, ReadCommitted, TakeRow, Writable

KEY = bindparam("lock_key", type_=BigInteger())
_BATCH = 1000
#: how often one asks anew, where there is neither a row to wait for nor a way in, before one waits in the INSERT
_ROUNDS = 50
#: how often one waits a second at the gate in vain before that
_AT_GATE = 3
#: how many keys an engine of the app remembers to have seen committed
_REMEMBERED = 10_000
_read_committed = select(ReadCommitted())
_settings = select(ReadCommitted(), Writable())
_plain_reads = select(PlainReads())


def acquire(execution: Execution, *, shared: bool) -> None:
    """Hold the key of this run, waiting as long as the connection lets one wait."""
    key = execution.values["lock_key"]
    if execution.wait is None:
        _acquire(execution, key, shared)
        return
    with execution.backend.bounded(execution.connection, execution.wait):
        _acquire(execution, key, shared)


def _acquire(execution: Execution, key: int, shared: bool) -> int:
    """Hold a key: how many rows that took, 1 or 0."""
    if execution.backend.bounded_insert:
        return _acquire_without_gate(execution, key, shared)
    return _acquire_by_gate(execution, key, shared)


def _acquire_without_gate(execution: Execution, key: int, shared: bool) -> int:
    """MariaDB: an INSERT that doesn't wait; where it fails, a look that does, for the row that another has."""
    table, values = execution.context.tables.locked_keys, {"lock_key": key}
    level: bool | None = execution.read_committed or None
    # the look comes first where nothing can be wrong with it: a session's variable doesn't tell of a SET TRANSACTION,
    # and a shared look, unlike an INSERT, is not refused in a read-only transaction
    looks = execution.read_committed and not shared
    for _ in range(_ROUNDS):
        if looks and _look(execution, key, shared):
            return 0
        made = _attempt(execution, key, shared)
        if made is not None:
            return made
        if level is None:
            level = bool(execution.execute(_read_committed, {}).scalar())
        looks = level and not shared
        if not level:
            if until_decided(execution, key):
                return execution.execute(take(table, shared), values).rowcount
        elif shared and _look(execution, key, shared=bool(known(execution, [key]))):
            # an uncommitted row is waited for as if to hold it alone, and then it is held alone, as a new one is
            return 0
    return execution.execute(take(table, shared), values).rowcount


def _acquire_by_gate(execution: Execution, key: int, shared: bool) -> int:
    """MySQL: a look that waits; and where there is no row, a gate, behind which nobody else inserts."""
    table, values = execution.context.tables.locked_keys, {"lock_key": key}
    if not execution.read_committed and not execution.moved and (execution.context, key) in _seen(execution):
        settings: Any = execution.execute(_settings, {}).one()
        level, writable = settings
        if not writable:
            raise execution.backend.not_writable()
        if not level:
            return execution.execute(take(table, shared), values).rowcount
    made = outside = 0
    for _ in range(_ROUNDS):
        if _look(execution, key, shared):
            return made
        presence = None
        with insert_guard(execution, key, seconds=1) as (passed, level):
            if execution.read_committed or level:
                inserted = _look_and_take(execution, key, shared) if passed else None
                if inserted is not None:
                    return inserted
            else:
                presence = make_present(execution, key, may_insert=passed)
        made += presence is Presence.MADE
        outside += not passed
        if presence is Presence.UNCOMMITTED:
            # by this very transaction, perhaps: a look that doesn't wait then finds it
            with contextlib.suppress(LockTimeout):
                if execution.execute(look(table, shared, level=False, writable=False, nowait=True), values).first():
                    return made
            if until_decided(execution, key):
                presence = Presence.COMMITTED
        if presence in (Presence.COMMITTED, Presence.MADE):
            _remember(execution, key)
            execution.execute(take(table, shared), values)
            return made
        if outside == _AT_GATE:
            break
    # No row to wait for, and yet no way in: somebody's gap lock, or a client that sleeps at the gate. The INSERT that
    # waits has InnoDB's queue, its deadlock detection and its time limit.
    return made + execution.execute(take(table, shared), values).rowcount


def _look(execution: Execution, key: int, shared: bool, *, nowait: bool = False) -> bool:
    """Hold the row of a key if there is one, waiting for it if need be; nothing above READ COMMITTED."""
    writes = not execution.backend.bounded_insert
    statement = look(
        execution.context.tables.locked_keys, shared, level=not execution.read_committed, nowait=nowait, writes=writes
    )
    return execution.execute(statement, {"lock_key": key}).first() is not None


def _attempt(execution: Execution, key: int, shared: bool) -> int | None:
    """Hold the key if it is free this instant, in the one statement that MariaDB has for it; ``None`` if it isn't."""
    try:
        return execution.execute(
            take(execution.context.tables.locked_keys, shared, nowait=True), {"lock_key": key}
        ).rowcount
    except LockTimeout:
        return None


def try_acquire(execution: Execution, *, shared: bool) -> bool:
    """Hold the key if it is free this instant; never wait."""
    key = execution.values["lock_key"]
    if execution.backend.bounded_insert:
        return _attempt(execution, key, shared) is not None
    table = execution.context.tables.locked_keys
    try:
        if _look(execution, key, shared, nowait=True):
            return True
        with insert_guard(execution, key, seconds=0) as (passed, level):
            if execution.read_committed or level:
                # who has the gate is putting the row there, to hold it
                return passed and _look_and_take(execution, key, shared, tries=True) is not None
            if make_present(execution, key, may_insert=passed) is Presence.ABSENT:
                return False
            statement = look(table, shared, level=False, writable=False, nowait=True)
            if execution.execute(statement).first() is None:
                if not passed:
                    return False  # removed between the two
                with execution.backend.bounded(execution.connection, 1):
                    execution.execute(take(table, shared))
            return True
    except LockTimeout:
        return False


def _look_and_take(execution: Execution, key: int, shared: bool, *, tries: bool = False) -> int | None:
    """Behind the gate: look again, and insert what nobody else is inserting. ``None`` when another has it.

    :param tries: wait no longer than the server can be told, a second, where somebody is all the same: above READ
        COMMITTED a key that was seen, and was removed since, is made again without the gate.
    """
    within = execution.backend.bounded(execution.connection, 1) if tries else contextlib.nullcontext()
    try:
        if _look(execution, key, shared, nowait=True):
            return 0
        with within:
            return execution.execute(take(execution.context.tables.locked_keys, shared), {"lock_key": key}).rowcount
    except LockTimeout:
        return None


def _seen(execution: Execution) -> dict[Any, None]:
    """The keys whose rows were seen committed: above READ COMMITTED their rows can be waited for unseen."""
    dialect: Any = execution.connection.dialect
    seen: dict[Any, None] = dialect.__dict__.setdefault("_sqlalchemy_locks_seen", {})
    return seen


def _remember(execution: Execution, key: int) -> None:
    seen = _seen(execution)
    if execution.moved:
        return  # to a schema that another statement may not be moved to
    if len(seen) >= _REMEMBERED:
        seen.clear()
    seen[execution.context, key] = None


def known(execution: Execution, keys: list[int]) -> list[int]:
    """Those of the keys that a read without a lock finds: none at all under SERIALIZABLE, where none is without."""
    table = execution.context.tables.locked_keys
    return list(execution.execute(select(table.c.key).where(table.c.key.in_(keys), PlainReads()), {}).scalars())


def delete_free(execution: Execution, keys: list[int]) -> int:
    """Delete those of the keys that nobody else holds; wait for nobody, so that sharers don't deadlock.

    The keys are ``known``: a locking look at an absent one would lock the gap above READ COMMITTED.
    """
    table = execution.context.tables.locked_keys
    if len(keys) > 1 and not execution.read_committed and not execution.execute(_read_committed, {}).scalar():
        # several at once may become a scan, which locks the gaps that it passes
        return sum(delete_free(execution, [key]) for key in keys)
    if not keys:
        return 0
    for key in keys:
        _seen(execution).pop((execution.context, key), None)
    free = select(table.c.key).where(table.c.key.in_(keys)).with_for_update(skip_locked=True)
    mine = list(execution.execute(free, {}).scalars())
    if mine:
        # one by one: of several, the server may make a scan, hint or no hint, and wait for those that others hold
        execution.execute(delete(table).where(table.c.key == KEY), [{"lock_key": key} for key in mine])
    return len(mine)


def delete_all_free(execution: Execution) -> int:
    """Delete every key that nobody holds, batch by batch."""
    if not execution.read_committed and not execution.execute(_plain_reads, {}).scalar():
        raise Unsupported(
            f"lock.vacuum would lock every key of {execution.backend.name} in a SERIALIZABLE transaction: "
            "use locks.run(sl.lock.vacuum())"
        )
    table = execution.context.tables.locked_keys
    batch = select(table.c.key).order_by(table.c.key).limit(_BATCH)
    removed, keys = 0, list(execution.execute(batch, {}).scalars())
    while keys:
        removed += delete_free(execution, keys)
        keys = list(execution.execute(batch.where(table.c.key > keys[-1]), {}).scalars())
    return removed


def make(execution: Execution, keys: list[int]) -> int:
    """Insert the absent ones of the keys, which are sorted; how many that were."""
    # a new key is acquired, so that whoever is just making it is waited for as ever
    return sum(_acquire(execution, key, shared=True) for key in sorted(set(keys) - set(known(execution, keys))))


@cache
def look(
    table: Table, shared: bool, *, level: bool = True, writable: bool = True, nowait: bool = False, writes: bool = True
) -> Select[Any]:
    """Find the row and hold it.

    :param level: only at READ COMMITTED. :param writable: only on a server that takes writes. :param writes: a shared
        look, too, is refused in a read-only transaction: it says that it would write to what it never reads.
    """
    statement: Select[Any] = select(literal_column("1")).where(table.c.key == KEY)
    if level:
        statement = statement.where(ReadCommitted())
    if writable:
        statement = statement.where(Writable())
    if not (shared and writes):
        return statement.select_from(table).with_for_update(read=shared, nowait=nowait)
    none = table.alias("written")
    joined = statement.select_from(table.outerjoin(none, literal_column("1 = 0")))
    return joined.with_for_update(read=True, nowait=nowait, of=table).suffix_with("FOR UPDATE OF written")


@cache
def take(table: Table, shared: bool, *, nowait: bool = False) -> Insert:
    """Find the row or make it, and hold it; a new one is held exclusively whatever was asked."""
    if shared:
        return (NowaitInsert if nowait else Insert)(table).prefix_with("IGNORE").values(key=KEY)
    return (NowaitTakeRow if nowait else TakeRow)(table).values(key=KEY)

"""InnoDB: a lock is the row of a key. How a transaction finds that row and holds it, or makes it.

Three facts of InnoDB shape this, each measured:

- At READ COMMITTED a look at an absent row locks nothing. At REPEATABLE READ and above it locks the gap around
  it until the transaction ends, and with it the first use of unrelated keys. So every look that may find
  nothing is guarded by ``ReadCommitted`` inside the statement: elsewhere it touches no row.
- An INSERT that waits for another's uncommitted row, which is then rolled back, is left with a lock on the gap;
  two such waiters deadlock. So at READ COMMITTED nobody waits in an INSERT: one waits in the look, and the
  INSERT never waits (MariaDB is told so; on MySQL see ``gate.py``).
- INSERT ... ON DUPLICATE KEY UPDATE (exclusive) and INSERT IGNORE (shared) lock the one record of a duplicate,
  and no gap, at any isolation. Above READ COMMITTED they do the waiting too: right, and in that one
  case a deadlock error for the caller, whose transaction InnoDB has then rolled back.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Insert, Select, Table, bindparam, delete, literal_column, select

from .elements import NowaitInsert, NowaitTakeRow, PlainReads, ReadCommitted, TakeRow, Writable
from .errors import LockTimeout, Unsupported
from .gate import gate, made_present
from .operation import Run

KEY = bindparam("lock_key", type_=BigInteger())
_BATCH = 1000
#: how often one looks for a row to wait for, before one waits in the INSERT
_LOOKS = 3
_read_committed = select(ReadCommitted())
_plain_reads = select(PlainReads())


def acquire(run: Run, *, shared: bool) -> None:
    """Hold the key of this run, waiting as long as the connection lets one wait."""
    if run.wait is None:
        return _acquire(run, shared)
    with run.engine.bounded(run.connection, run.wait):
        return _acquire(run, shared)


def _acquire(run: Run, shared: bool) -> None:
    table = run.place.tables.locked_keys
    for _ in range(_LOOKS):
        if run.execute(look(table, shared, guarded=True)).first() is not None:
            return
        if run.engine.bounded_insert:
            if attempt(run, shared):
                return
            if not run.execute(_read_committed, {}).scalar():
                break
        else:
            with gate(run, run.values["lock_key"], seconds=1) as (passed, read_committed):
                if not read_committed:
                    run.execute(take(table, shared))
                    return
                if passed and _look_and_take(run, shared):
                    return
    # No row to wait for, and yet no way in: somebody's gap lock, or a client that sleeps at the gate. The INSERT that
    # waits has InnoDB's queue, its deadlock detection and its time limit.
    run.execute(take(table, shared))


def attempt(run: Run, shared: bool) -> bool:
    """Hold the key if it is free this instant, in the one statement that MariaDB has for it."""
    try:
        run.execute(take(run.place.tables.locked_keys, shared, nowait=True))
    except LockTimeout:
        return False
    return True


def try_acquire(run: Run, *, shared: bool) -> bool:
    """Hold the key if it is free this instant; never wait."""
    if run.engine.bounded_insert:
        return attempt(run, shared)
    table = run.place.tables.locked_keys
    try:
        if run.execute(look(table, shared, guarded=True, nowait=True)).first() is not None:
            return True
        with gate(run, run.values["lock_key"], seconds=0) as (passed, read_committed):
            if read_committed:
                # who has the gate is putting the row there, to hold it
                return passed and _look_and_take(run, shared)
            if not made_present(run, may_insert=passed):
                return False
            if run.execute(look(table, shared, guarded=False, nowait=True)).first() is None and not passed:
                return False  # removed between the two
            # the look was a read: this is the write that a read-only transaction or a replica refuses
            run.execute(take(table, shared))
            return True
    except LockTimeout:
        return False


def _look_and_take(run: Run, shared: bool) -> bool:
    """Behind the gate: look again, and insert what nobody else can be inserting. False when another has it."""
    table = run.place.tables.locked_keys
    try:
        if run.execute(look(table, shared, guarded=True, nowait=True)).first() is None:
            run.execute(take(table, shared))
    except LockTimeout:
        return False
    return True


def known(run: Run, keys: list[int]) -> list[int]:
    """Those of the keys that a read without a lock finds: none at all under SERIALIZABLE, where none is without."""
    table = run.place.tables.locked_keys
    return list(run.execute(select(table.c.key).where(table.c.key.in_(keys), PlainReads()), {}).scalars())


def delete_free(run: Run, keys: list[int]) -> int:
    """Delete those of the keys that nobody else holds; wait for nobody, so that sharers don't deadlock.

    The keys are ``known``: a locking look at an absent one would lock the gap above READ COMMITTED.
    """
    table = run.place.tables.locked_keys
    if len(keys) > 1 and not run.read_committed and not run.execute(_read_committed, {}).scalar():
        # several at once may become a scan, which locks the gaps that it passes
        return sum(delete_free(run, [key]) for key in keys)
    if not keys:
        return 0
    free = select(table.c.key).where(table.c.key.in_(keys)).with_for_update(skip_locked=True)
    mine = list(run.execute(free, {}).scalars())
    if mine:
        # one by one: of several, the server may make a scan, hint or no hint, and wait for those that others hold
        run.execute(delete(table).where(table.c.key == KEY), [{"lock_key": key} for key in mine])
    return len(mine)


def delete_all_free(run: Run) -> int:
    """Delete every key that nobody holds, batch by batch."""
    if not run.read_committed and not run.execute(_plain_reads, {}).scalar():
        raise Unsupported(
            f"lock.vacuum would lock every key of {run.engine.name} in a SERIALIZABLE transaction: "
            "use locks.run(sl.lock.vacuum())"
        )
    table = run.place.tables.locked_keys
    batch = select(table.c.key).order_by(table.c.key).limit(_BATCH)
    removed, keys = 0, list(run.execute(batch, {}).scalars())
    while keys:
        removed += delete_free(run, keys)
        keys = list(run.execute(batch.where(table.c.key > keys[-1]), {}).scalars())
    return removed


def make(run: Run, keys: list[int]) -> int:
    """Insert the absent ones of the keys, which are sorted; how many that were."""
    table = run.place.tables.locked_keys
    made = 0
    for key in sorted(set(keys) - set(known(run, keys))):
        if run.engine.bounded_insert:
            made += run.execute(take(table, shared=True), {"lock_key": key}).rowcount
        else:
            with gate(run, key, seconds=1):
                made += run.execute(take(table, shared=True), {"lock_key": key}).rowcount
    return made


@cache
def look(table: Table, shared: bool, *, guarded: bool, nowait: bool = False) -> Select[Any]:
    """Find the row and hold it."""
    statement: Select[Any] = select(literal_column("1")).select_from(table).where(table.c.key == KEY)
    if guarded:
        statement = statement.where(ReadCommitted(), Writable())
    return statement.with_for_update(read=shared, nowait=nowait)


@cache
def take(table: Table, shared: bool, *, nowait: bool = False) -> Insert:
    """Find the row or make it, and hold it; a new one is held exclusively whatever was asked."""
    if shared:
        return (NowaitInsert if nowait else Insert)(table).prefix_with("IGNORE").values(key=KEY)
    return (NowaitTakeRow if nowait else TakeRow)(table).values(key=KEY)

"""MySQL: a key's first row, put there so that no ``try`` ever waits for it.

MySQL can look at a row without waiting (NOWAIT), but an INSERT always waits for another transaction's
uncommitted row of the same key. So the first row of a key is inserted under a gate: a named lock of the server
(``GET_LOCK``), held for the few statements around the INSERT. Who tries the key looks, passes the gate, looks
again, and only then inserts.

- Nobody waits at the gate for long: a second at most, after which the row's own queue decides. The gate
  therefore adds no deadlock that InnoDB could not see.
- Under REPEATABLE READ a locking look at an absent row would lock the gap around it until the transaction
  ends, and unrelated keys with it. The looks are guarded by ``ReadCommitted`` inside the statement: elsewhere
  they touch nothing. ``acquire`` then inserts without a look (which locks no gap); ``try`` has the row made by a
  short connection of its own, so that it looks only at a row that is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

from sqlalchemy import BigInteger, Engine, Integer, String, Table, bindparam, func, insert, literal, literal_column, select
from sqlalchemy.sql import Executable

from .elements import Gate, ReadCommitted, Writable
from .errors import LockTimeout
from .operation import Run, translated

_KEY = bindparam("lock_key", type_=BigInteger())


def acquire_behind_gate(run: Run, statement: Executable, *, shared: bool) -> None:
    """Take the key, waiting as long as the connection lets one wait."""
    if run.wait is None:
        return _acquire(run, statement, shared)
    with run.engine.bounded(run.connection, run.wait):
        return _acquire(run, statement, shared)


def _acquire(run: Run, statement: Executable, shared: bool) -> None:
    if run.execute(_look(run.place.tables.locked_keys, shared, guarded=True)).first() is None:
        with _gate(run, run.values["lock_key"], seconds=1):
            run.execute(statement)


def try_behind_gate(run: Run, statement: Executable, *, shared: bool) -> bool:
    """Take the key if it is free this instant."""
    guarded = _look(run.place.tables.locked_keys, shared, guarded=True, nowait=True)
    try:
        if run.execute(guarded).first() is not None:
            return True
        with _gate(run, run.values["lock_key"], seconds=0) as (passed, read_committed):
            if not read_committed:
                return _try_present(run, statement, shared, passed)
            if not passed:
                return False
            if run.execute(guarded).first() is None:
                run.execute(statement)
            return True
    except LockTimeout:
        return False


def insert_behind_gate(run: Run, statement: Executable, key: int) -> int:
    """Insert a key ahead of its use; how many rows that made."""
    with _gate(run, key, seconds=1):
        return run.execute(statement, {"lock_key": key}).rowcount


def _try_present(run: Run, statement: Executable, shared: bool, passed: bool) -> bool:
    if not _made_present(run, may_insert=passed):
        return False
    if run.execute(_look(run.place.tables.locked_keys, shared, guarded=False, nowait=True)).first() is not None:
        # the look was a read: the write that a read-only transaction or a replica would refuse is this one
        run.execute(statement)
        return True
    # removed between the two: by now this transaction has locked the gap, and may insert into it
    if passed:
        run.execute(statement)
    return passed


def _made_present(run: Run, may_insert: bool) -> bool:
    """Whether the key has a row, committed or not, putting one there if need be; on a connection of its own."""
    app = run.connection.engine
    aside = Engine(app.pool.recreate(), app.dialect, app.url)
    values = {"lock_key": run.values["lock_key"]}
    options = {**run.connection.get_execution_options(), "isolation_level": "AUTOCOMMIT"}
    try:
        with translated(run.engine), aside.connect() as connection:
            connection = connection.execution_options(**options)
            look = _look(run.place.tables.locked_keys, True, guarded=False, nowait=True)
            try:
                with translated(run.engine):
                    if connection.execute(look, values).first() is not None:
                        return True
            except LockTimeout:
                return True
            if may_insert:
                with run.engine.bounded(connection, 1), contextlib.suppress(LockTimeout), translated(run.engine):
                    connection.execute(_make(run.place.tables.locked_keys), values)
            return may_insert
    finally:
        aside.dispose()


@lru_cache(maxsize=None)
def _look(table: Table, shared: bool, *, guarded: bool, nowait: bool = False) -> Executable:
    look = select(literal_column("1")).select_from(table).where(table.c.key == _KEY)
    if guarded:
        look = look.where(ReadCommitted(), Writable())
    return look.with_for_update(read=shared, nowait=nowait)


@lru_cache(maxsize=None)
def _make(table: Table) -> Executable:
    return insert(table).prefix_with("IGNORE").values(key=_KEY)


@lru_cache(maxsize=None)
def _enter_and_leave(table: Table) -> tuple[Executable, Executable]:
    name = Gate(literal(table.fullname, String()), _KEY)
    enter = select(func.get_lock(name, bindparam("seconds", type_=Integer())), ReadCommitted())
    return enter, select(func.release_lock(name))


@contextlib.contextmanager
def _gate(run: Run, key: int, *, seconds: int) -> Iterator[tuple[bool, bool]]:
    """Hold the gate of a key: whether it was free, and whether this transaction reads at READ COMMITTED."""
    enter, leave = _enter_and_leave(run.place.tables.locked_keys)
    passed, read_committed = run.execute(enter, {"lock_key": key, "seconds": seconds}).one()
    try:
        yield bool(passed), bool(read_committed)
    finally:
        if passed and not run.connection.invalidated:
            run.execute(leave, {"lock_key": key})

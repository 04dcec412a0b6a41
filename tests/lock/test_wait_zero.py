"""``locks_wait=0``: one attempt, in the mode that was asked for. What is locked is named."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import Engine, Table, select

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from tests.fixtures.parties import BRIEFLY, EVERYWHERE, unused


@pytest.mark.parametrize("name", EVERYWHERE)
def test_zero_wait_acquires_only_free_keys(engine: Engine, name: str) -> None:
    key = sl.lock.key(unused())
    exclusive, shared = (make(key).execution_options(locks_wait=0) for make in (sl.lock.exclusive, sl.lock.shared))
    sl.Locks(engine).run(sl.lock.create(key))
    with engine.connect() as one, engine.connect() as two:
        assert one.scalar(shared) is None
        if name != "sqlite":
            assert two.scalar(shared) is None
            two.rollback()
        with pytest.raises(sl.LockTimeout, match=rf"\({key}\): it is locked"):
            two.execute(exclusive)
        one.rollback()
        two.rollback()
        assert one.scalar(exclusive) is None
        with pytest.raises(sl.LockTimeout, match=rf"\({key}\): it is locked"):
            two.execute(shared)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_timeout_in_a_session_names_the_lock(engine: Engine, name: str) -> None:
    key = unused()
    table: Table = build_context(engine.dialect, {}).tables.semaphore
    for operation in (sl.lock.create(key), sl.semaphore.create(key, 1), sl.Mutex().create(key)):
        sl.Locks(engine).run(operation)
    with engine.connect() as one, engine.connect() as two:
        row = one.scalar(select(table.c.id).where(table.c.name == key))
        one.rollback()
        for operation, named in (
            (sl.lock.exclusive(key), f"lock.exclusive({key!r}): "),
            (sl.lock.row(table, row), f"lock.row({table}, {row}): "),
            (sl.semaphore.acquire({key: 1}), f"semaphore.acquire({key!r}): "),
            (sl.Mutex().acquire(key), f"mutex.acquire({key!r}): "),
        ):
            one.execute(operation)
            with pytest.raises(sl.LockTimeout, match=re.escape(named)) as raised:
                two.execute(operation.execution_options(locks_wait=BRIEFLY[name]))
            # MySQL lists holders to a transaction that goes on; MariaDB those that somebody waits for
            listed = name == "mysql" and named.startswith("lock.exclusive")
            assert [holder.name for holder in raised.value.holders] == [key] * listed
            one.rollback()
            two.rollback()

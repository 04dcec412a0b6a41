"""Time limits of the server's and the driver's: in ``Locks`` a wait goes on after them, in a session they are named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conformance.faces import ASYNC, SYNC, opened
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, async_connected, connected, installed, later, until, unused

#: by a name: the server, the driver, the façade, and the driver's arguments
LIMITS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "transaction_timeout/psycopg": ("postgresql18", "psycopg", SYNC, {"options": "-c transaction_timeout=400ms"}),
    "transaction_timeout/psycopg2": ("postgresql18", "psycopg2", SYNC, {"options": "-c transaction_timeout=400ms"}),
    "transaction_timeout/asyncpg": (
        "postgresql18",
        "asyncpg",
        ASYNC,
        {"server_settings": {"transaction_timeout": "400ms"}},
    ),
    "statement_timeout": ("postgresql15", "psycopg", ASYNC, {"options": "-c statement_timeout=300ms"}),
    "statement_timeout/yugabytedb": ("yugabytedb", "psycopg2", SYNC, {"options": "-c statement_timeout=300ms"}),
    "command_timeout": ("postgresql15", "asyncpg", ASYNC, {"command_timeout": 0.4}),
    "read_timeout": ("mysql", "pymysql", SYNC, {"read_timeout": 1}),
    "read_timeout/asyncmy": ("mysql", "asyncmy", ASYNC, {"read_timeout": 1}),
    "read_timeout/mariadb": ("mariadb", "mariadb+pymysql", SYNC, {"read_timeout": 1}),
    "max_execution_time": ("mysql", "pymysql", SYNC, {"init_command": "SET SESSION max_execution_time = 300"}),
    "max_statement_time": ("mariadb", "pymysql", SYNC, {"init_command": "SET SESSION max_statement_time = 0.3"}),
}


@pytest.mark.parametrize("case", LIMITS)
def test_wait_ends_at_its_own_deadline(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], case: str
) -> None:
    name, driver, face, arguments = LIMITS[case]
    key, watcher, attempts = unused(), watch(name), []

    def enter(locks: Any, timeout: float | None) -> float:
        began = time.monotonic()
        with locks.exclusive(key, timeout=timeout):
            return time.monotonic() - began

    url = installed(servers, name, driver)
    with opened(face, url, connect_args=arguments) as (locks, engine), engine_to(name).connect() as holder:
        holder.execute(sl.lock.exclusive(key))
        began = time.monotonic()
        with pytest.raises(sl.LockTimeout, match="within 1 s"):
            enter(locks, 1)
        assert time.monotonic() - began >= 1
        event.listen(engine, "checkout", lambda *_: attempts.append(1))
        waiting = later(enter, locks, None)
        until(lambda: len(attempts) > 1, unless=waiting)
        holder.rollback()
        waiting.result(PATIENCE)
        watcher.until_none_wait()  # none of its sessions is left behind


@pytest.mark.parametrize(
    ("case", "limit"), {case: case.partition("/")[0] for case in LIMITS if case != "max_execution_time"}.items()
)
def test_session_gets_an_error_that_names_the_limit(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], case: str, limit: str
) -> None:
    name, driver, face, arguments = LIMITS[case]
    key = unused()
    url = installed(servers, name, driver)

    async def wait_in_task() -> None:
        async with async_connected(url, connect_args=arguments) as engine, AsyncSession(engine) as session:
            await session.execute(sl.lock.exclusive(key))

    with engine_to(name).connect() as holder:
        holder.execute(sl.lock.exclusive(key))
        with pytest.raises(sl.LockTimeout, match=limit):
            if face == ASYNC:
                asyncio.run(wait_in_task())
            else:
                with connected(url, connect_args=arguments) as engine, Session(engine) as session:
                    session.execute(sl.lock.exclusive(key))
        watch(name).until_none_wait()


@pytest.mark.parametrize("case", ["statement_timeout", "command_timeout", "read_timeout", "max_statement_time"])
def test_wait_for_a_row_continues(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], case: str
) -> None:
    name, driver, face, arguments = LIMITS[case]
    task, attempts, other = unused("task"), [], engine_to(name)
    sl.Locks(other).run(sl.Mutex().create(task))
    acquiring = sl.Mutex().acquire(task)
    with opened(face, installed(servers, name, driver), connect_args=arguments) as (locks, engine):
        with other.connect() as holder:
            assert holder.scalar(acquiring)
            with pytest.raises(sl.LockTimeout):
                locks.run(acquiring.execution_options(locks_wait=1))
            event.listen(engine, "checkout", lambda *_: attempts.append(1))
            waiting = later(locks.run, acquiring.execution_options(locks_wait=PATIENCE))
            until(lambda: len(attempts) > 1, unless=waiting)
            holder.rollback()
        assert waiting.result(PATIENCE) is True
        watch(name).until_none_wait()


def test_no_attempt_follows_one_that_died_after_the_deadline(
    engine_to: MakeEngine, watch: Callable[[str], Watch]
) -> None:
    """Nothing was acquired, and the time is up."""
    engine, watcher, attempts = engine_to("postgresql15"), watch("postgresql15"), []

    def die(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "lock.try_exclusive" in statement:  # after the deadline
            attempts.append(statement)
            watcher.kill(watcher.backend(connection))

    event.listen(engine, "begin", lambda connection: time.sleep(0.3))
    event.listen(engine, "before_cursor_execute", die)
    with pytest.raises(sl.LockTimeout, match="within 0.2 s"), sl.Locks(engine).exclusive(unused(), timeout=0.2):
        pass
    assert len(attempts) == 1

"""MySQL: the gate before a key's first row is left whatever happens; GET_LOCK outlives a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.operation.fixtures import MakeEngine
from tests.operation.parties import PATIENCE, Watch, async_connected, installed, later, seen, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
MINE = text("SELECT count(*) FROM performance_schema.metadata_locks WHERE object_type = 'USER LEVEL LOCK'")
EVERY: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared, sl.lock.create]

level = pytest.mark.parametrize("level", LEVELS)
every = pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)


def gates(connection: Connection) -> int:
    """How many named locks are held, or waited for, on the whole server."""
    return int(connection.scalar(MINE) or 0)


@pytest.fixture
def engine(engine_to: MakeEngine, level: str) -> Engine:
    return engine_to("mysql", isolation_level=level)


@level
@every
def test_it_is_passed_and_left(engine: Engine, make: Any) -> None:
    with engine.connect() as connection, engine.connect() as other:
        with seen(engine) as statements:
            connection.execute(make(unused()))
        assert any("get_lock(" in statement for statement in statements)
        assert gates(other) == 0


@level
@every
def test_after_a_wait_in_vain(engine: Engine, make: Any) -> None:
    key = unused()
    with engine.connect() as holder, engine.connect() as other:
        holder.execute(sl.lock.exclusive(key))
        other.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
        if "try" in make.__name__:
            assert other.scalar(make(key)) is False
        else:
            with pytest.raises(sl.LockTimeout):
                other.execute(make(key))
        assert gates(holder) == 0
        other.invalidate()


@level
def test_after_a_deadlock(engine: Engine, watch: Callable[[str], Watch]) -> None:
    """Each holds a new key and asks for the other's; InnoDB ends one of them."""
    a, b = unused(), unused()
    with engine.connect() as one, engine.connect() as other:
        one.execute(sl.lock.exclusive(a))
        other.execute(sl.lock.exclusive(b))
        waiting = later(one.execute, sl.lock.exclusive(b))
        watch("mysql").until_waiting(waiting)
        closing = later(other.execute, sl.lock.exclusive(a))
        errors = [error for error in (closing.exception(PATIENCE),) if error]
        if errors:
            other.rollback()
        if error := waiting.exception(PATIENCE):
            errors.append(error)
        assert [type(error).__mro__[1] for error in errors] == [DBAPIError.__subclasses__()[0]] or len(errors) == 1
        assert "1213" in str(errors[0])
        assert gates(one if waiting.exception() is None else other) == 0


@level
def test_a_new_key_while_somebody_has_the_gate(engine: Engine) -> None:
    """A try answers False there: somebody is just putting the row in its place. A wait goes on, and has it."""
    key = unused()
    with engine.connect() as gatekeeper, engine.connect() as other:
        with seen(engine) as statements:
            other.execute(sl.lock.exclusive(key))
        other.rollback()
        assert statements
        name = "SHA2(CONCAT_WS(':', 'sqlalchemy_locks', DATABASE(), 'lock_locked_keys', :key), 256)"
        key = unused()
        assert gatekeeper.scalar(text(f"SELECT GET_LOCK({name}, 0)"), {"key": sl.lock.key(key)}) == 1
        for make in (sl.lock.try_exclusive, sl.lock.try_shared):
            assert other.scalar(make(key)) is False
            other.rollback()
        waiting = later(other.execute, sl.lock.exclusive(key))
        until_asked_again(gatekeeper)
        gatekeeper.scalar(text(f"SELECT RELEASE_LOCK({name})"), {"key": sl.lock.key(key)})
        waiting.result(PATIENCE)
        assert gates(gatekeeper) == 0


def until_asked_again(connection: Connection) -> None:
    """Return when somebody waits at a gate."""
    from tests.operation.parties import until

    until(lambda: gates(connection) == 2)


def test_a_cancelled_wait_leaves_no_gate(servers: Any, watch: Callable[[str], Watch], engine_to: MakeEngine) -> None:
    key = unused()
    watched = watch("mysql")

    async def main(connection: Connection) -> None:
        async with async_connected(installed(servers, "mysql", "aiomysql")) as engine:
            async with engine.connect() as other:
                waiting = asyncio.create_task(other.execute(sl.lock.exclusive(key)))
                while not await asyncio.to_thread(watched.waiting):
                    await asyncio.sleep(0.13)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting

    with engine_to("mysql").connect() as holder:
        holder.execute(sl.lock.exclusive(key))
        asyncio.run(main(holder))
        from tests.operation.parties import until

        until(lambda: gates(holder) == 0)


def test_databases_of_one_server_have_gates_of_their_own(servers: Any, engine_to: MakeEngine) -> None:
    from tests.conftest import install
    from tests.operation.parties import connected

    url, key = servers.fresh("mysql", "pymysql"), unused()
    install(url)
    name = "SHA2(CONCAT_WS(':', 'sqlalchemy_locks', DATABASE(), 'lock_locked_keys', :key), 256)"
    with connected(url) as elsewhere, elsewhere.connect() as gatekeeper, engine_to("mysql").connect() as here:
        gatekeeper.execute(text(f"SELECT GET_LOCK({name}, 0)"), {"key": sl.lock.key(key)})
        assert here.scalar(sl.lock.try_exclusive(key)) is True
        assert gates(here) == 1

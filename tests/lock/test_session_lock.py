"""session_exclusive and session_unlock: locks of a connection, across its transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import (
    ASYNC,
    PATIENCE,
    SERVERS,
    Watch,
    async_connected,
    installed,
    later,
    seen,
    until,
    unused,
)

ASYNC_SERVERS = {name: pair for name, pair in ASYNC.items() if pair[0] != "sqlite"}


@pytest.fixture(params=SERVERS)
def engine(engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    """With one connection in its pool, so that the next user gets whatever the connection has kept."""
    return engine_to(request.param, pool_size=1, max_overflow=0)


@pytest.fixture
def other(engine: Engine, engine_to: MakeEngine, request: pytest.FixtureRequest) -> Engine:
    """Another engine for the same database."""
    return engine_to(request.node.callspec.params["engine"], poolclass=NullPool)


#: sent to the server without the library, so that the comparison doesn't use the code under test
FREE = {
    "postgresql": "SELECT pg_try_advisory_xact_lock(:key)",
    "mysql": "SELECT IS_FREE_LOCK(CONCAT("
    "LEFT(SHA2(CONCAT_WS(':', 'sqlalchemy_locks.session', DATABASE()), 256), 40), ':', :key))",
}


def free(other: Engine, key: str) -> bool:
    """Whether another connection can acquire it."""
    with other.connect() as connection:
        dialect = connection.dialect.name
        return bool(connection.scalar(text(FREE.get(dialect, FREE["mysql"])), {"key": sl.lock.key(key)}))


def test_held_across_transactions_until_unlocked(engine: Engine, other: Engine) -> None:
    key = unused()
    with engine.connect() as connection:
        assert connection.scalar(sl.lock.session_exclusive(key)) is None
        connection.commit()
        connection.rollback()
        assert not free(other, key)
        assert connection.scalar(sl.lock.session_unlock(key)) is True
        assert free(other, key)
        assert connection.scalar(sl.lock.session_unlock(key)) is False


def test_each_lock_needs_an_unlock(engine: Engine, other: Engine) -> None:
    key = unused()
    with engine.connect() as connection:
        for _ in range(2):
            connection.execute(sl.lock.session_exclusive(key))
        assert connection.scalar(sl.lock.session_unlock(key)) is True
        assert not free(other, key)
        assert connection.scalar(sl.lock.session_unlock(key)) is True
        assert free(other, key)


@pytest.mark.parametrize("end", ["close", "rollback", "error", "detach", "invalidate"])
def test_released_when_the_connection_returns_to_its_pool(engine: Engine, other: Engine, end: str) -> None:
    key = unused()
    connection = engine.connect()
    connection.execute(sl.lock.session_exclusive(key))
    if end == "rollback":
        connection.rollback()
    elif end == "error":
        with pytest.raises(Exception, match="nonsense"):
            connection.exec_driver_sql("nonsense")
    elif end == "detach":
        connection.detach()
    elif end == "invalidate":
        connection.invalidate()
    connection.close()
    if end in ("detach", "invalidate"):
        until(lambda: free(other, key))  # the connection is closed, which the server notices a little later
    assert free(other, key)
    with engine.connect() as connection:
        assert connection.scalar(sl.lock.session_unlock(key)) is False


@pytest.mark.parametrize("options", [{"pool_reset_on_return": None}, {"isolation_level": "AUTOCOMMIT"}], ids=str)
@pytest.mark.parametrize("name", SERVERS)
def test_released_whatever_reset_on_return_is(engine_to: MakeEngine, name: str, options: Any) -> None:
    key = unused()
    engine, other = engine_to(name, pool_size=1, max_overflow=0, **options), engine_to(name, poolclass=NullPool)
    for _ in range(2):
        with engine.connect() as connection:
            connection.execute(sl.lock.session_exclusive(key))
            assert not free(other, key)
            connection.commit()
        assert free(other, key)


def test_pools_at_reused_addresses(servers: Any) -> None:
    """After a pool was disposed of, another one may get the same ``id()``: it is a different pool."""
    url = installed(servers, "postgresql15")
    first = create_engine(url)
    for _ in range(40):
        key = unused()
        with first.connect() as connection:
            connection.execute(sl.lock.session_exclusive(key))
        first.dispose()
        engine = create_engine(url, pool_size=1, max_overflow=0)
        with engine.connect() as connection:
            connection.execute(sl.lock.session_exclusive(key))
        with engine.connect() as connection:
            left_behind = connection.scalar(sl.lock.session_unlock(key))
        engine.dispose()
        assert left_behind is False


def test_session_bound_to_an_engine_is_refused(engine: Engine) -> None:
    engine.connect().close()
    with seen(engine) as statements:
        for operation in (sl.lock.session_exclusive(unused()), sl.lock.session_unlock(unused())):
            with Session(engine) as session:
                for execute in (session.execute, session.scalar, session.scalars):
                    with pytest.raises(sl.Unsupported, match="belongs to a connection"):
                        execute(operation)
            with Session() as unbound, pytest.raises(sl.Unsupported, match="belongs to a connection"):
                unbound.execute(operation, bind_arguments={"bind": engine})
        # at most the statements that are sent once per server
        assert not any("pg_advisory" in statement or "LOCK(" in statement for statement in statements)


def test_locks_run_refuses_them(engine: Engine) -> None:
    for operation in (sl.lock.session_exclusive(unused()), sl.lock.session_unlock(unused())):
        with pytest.raises(sl.Unsupported, match="ends with its connection"):
            sl.Locks(engine).run(operation)


def test_waiter_acquires_after_unlock(
    engine: Engine, other: Engine, watch: Callable[[str], Watch], request: pytest.FixtureRequest
) -> None:
    key = unused()
    with engine.connect() as holder, other.connect() as waiter:
        holder.execute(sl.lock.session_exclusive(key))
        waiting = later(waiter.scalar, sl.lock.session_exclusive(key))
        watch(request.node.callspec.params["engine"]).until_waiting(waiting)
        holder.scalar(sl.lock.session_unlock(key))
        assert waiting.result(PATIENCE) is None
        assert waiter.scalar(sl.lock.session_unlock(key)) is True


@pytest.mark.parametrize("name", SERVERS)
def test_locks_wait_limits_the_wait(engine_to: MakeEngine, name: str) -> None:
    key, engine = unused(), engine_to(name, poolclass=NullPool)
    with engine.connect() as holder, engine.connect() as waiter:
        holder.execute(sl.lock.session_exclusive(key))
        with pytest.raises(sl.LockTimeout, match=rf"lock\.session_exclusive\('{key}'\): "):
            waiter.execute(sl.lock.session_exclusive(key).execution_options(locks_wait=0.05))
        waiter.rollback()
        assert waiter.scalar(sl.lock.session_unlock(key)) is False
        assert not free(engine, key)


def test_wait_settings_are_restored(engine: Engine) -> None:
    ask = "SHOW lock_timeout" if engine.dialect.name == "postgresql" else "SELECT @@innodb_lock_wait_timeout"
    with engine.connect() as connection:
        before = connection.exec_driver_sql(ask).scalar()
        connection.execute(sl.lock.session_exclusive(unused()).execution_options(locks_wait=7))
        assert connection.exec_driver_sql(ask).scalar() == before


def test_same_lock_as_exclusive_on_postgresql_only(engine: Engine, other: Engine) -> None:
    key = unused()
    with engine.connect() as connection, other.connect() as stranger:
        connection.execute(sl.lock.session_exclusive(key))
        got = stranger.scalar(sl.lock.try_exclusive(key))
        assert got is (engine.dialect.name != "postgresql")


def test_unsupported_on_sqlite(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite")
    with engine.connect() as connection, Session(connection) as session:
        for execute in (connection.execute, session.execute):
            for operation in (sl.lock.session_exclusive("a"), sl.lock.session_unlock("a")):
                with pytest.raises(sl.Unsupported, match=r"SQLite has none: use lock\.exclusive"):
                    execute(operation)


@pytest.mark.parametrize(("name", "driver"), ASYNC_SERVERS.values(), ids=ASYNC_SERVERS)
def test_async_connection(servers: Any, engine_to: MakeEngine, name: str, driver: str) -> None:
    other = engine_to(name, poolclass=NullPool)

    async def main() -> None:
        key = unused()
        async with async_connected(installed(servers, name, driver), pool_size=1, max_overflow=0) as engine:
            async with engine.connect() as connection:
                assert await connection.scalar(sl.lock.session_exclusive(key)) is None
                await connection.commit()
                assert not free(other, key)
                assert await connection.scalar(sl.lock.session_unlock(key)) is True
                assert free(other, key)
                await connection.execute(sl.lock.session_exclusive(key))
            assert free(other, key)
            async with engine.connect() as connection:
                assert await connection.scalar(sl.lock.session_unlock(key)) is False
                async with AsyncSession(connection) as session:
                    await session.execute(sl.lock.session_exclusive(key))
                    await session.commit()
                    assert not free(other, key)
            assert free(other, key)
            async with AsyncSession(engine) as session:
                with pytest.raises(sl.Unsupported, match="belongs to a connection"):
                    await session.execute(sl.lock.session_exclusive(key))

    asyncio.run(main())

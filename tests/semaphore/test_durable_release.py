"""``durable_release=False``: PostgreSQL answers the release of a lease before it is flushed, and a crash may lose it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

import sqlalchemy_locks as sl
from tests import servers as real
from tests.conftest import Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import EVERYWHERE, PATIENCE, async_connected, connected, unused
from tests.fixtures.semaphores import expire, made

# a constraint trigger that is deferred fires just before the commit
RECORD = """
    CREATE TABLE flushed (state text, setting text);
    CREATE FUNCTION record_flush() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
      INSERT INTO flushed VALUES (new.state, current_setting('synchronous_commit'));
      RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER record_flush AFTER INSERT OR UPDATE ON lock.permit_request
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION record_flush();
"""


@pytest.fixture(scope="module")
def url(servers: Servers) -> str:
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    with connected(url) as engine, engine.begin() as connection:
        connection.exec_driver_sql(RECORD)
    return url


def settings(engine: Engine) -> set[tuple[str, str]]:
    """Return how each state of a request was committed since the last call, however often."""
    with engine.begin() as connection:
        rows = connection.execute(text("DELETE FROM flushed RETURNING state, setting"))
        return {(state, setting) for state, setting in rows}


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE", "AUTOCOMMIT"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_only_the_release_of_a_lease_is_not_flushed(url: str, driver: str, level: str) -> None:
    own = url.replace("+psycopg:", f"+{driver}:")
    with connected(url) as other, connected(own, isolation_level=level, pool_size=1, max_overflow=0) as engine:
        locks, plain, room = sl.Locks(engine, durable_release=False), sl.Locks(engine), made(other, 5)

        def through(locks: sl.Locks, release: Callable[[sl.Grant], object], ttl: float | None) -> set[tuple[str, str]]:
            grant = locks.acquire({room: 1}, ttl=ttl)
            assert locks.renew(grant)
            assert release(grant) is sl.Released.RELEASED
            return settings(other)

        flushed = {("ACQUIRED", "on"), ("RELEASED", "on")}
        assert through(locks, locks.release, 60) == {("ACQUIRED", "on"), ("RELEASED", "off")}
        # without a ttl a lost release would keep the permits forever, and of an id no ttl is known
        assert through(locks, locks.release, None) == flushed
        assert through(locks, lambda grant: locks.release(grant.external_id), 60) == flushed
        assert through(locks, lambda grant: locks.run(sl.semaphore.release(grant)), 60) == flushed
        assert through(plain, plain.release, 60) == flushed
        for block in (locks.semaphore({room: 1}, ttl=60), locks.lease(unused("lease"), ttl=60)):
            with block:
                assert settings(other) == {("ACQUIRED", "on")}
            assert settings(other) == {("RELEASED", "off")}
        # the connection keeps nothing of it
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_async_locks_do_the_same(url: str, driver: str) -> None:
    async def main() -> None:
        async with async_connected(url.replace("+psycopg:", f"+{driver}:")) as engine:
            async with sl.AsyncLocks(engine, durable_release=False).lease(unused("lease"), ttl=60):
                pass

    with connected(url) as other:
        settings(other)
        asyncio.run(main())
        assert settings(other) == {("ACQUIRED", "on"), ("RELEASED", "off")}


@pytest.mark.parametrize(("name", "driver"), EVERYWHERE.items(), ids=EVERYWHERE)
def test_it_is_allowed_on_every_engine(engine_to: MakeEngine, name: str, driver: str) -> None:
    engine = engine_to(name, driver)
    locks, room = sl.Locks(engine, durable_release=False), made(engine, 1)
    for _ in range(2):
        assert locks.release(locks.acquire({room: 1}, ttl=60, timeout=0)) is sl.Released.RELEASED
        with locks.semaphore({room: 1}, ttl=60, timeout=0):
            pass


def test_a_crash_loses_such_a_release_and_its_permits_end_by_their_ttl(servers: Servers) -> None:
    servers.server("postgresql15")  # skips with a reason where it isn't installed
    server = real.make("postgresql15")
    assert isinstance(server, real.PostgreSQL)
    # otherwise a background process would flush the release a moment later
    server.settings = {**server.settings, "wal_writer_delay": "10s"}
    with server.start():
        url = server.url("psycopg")
        install(url)
        with connected(url) as engine:
            room = made(engine, 1)
            for _ in range(5):
                if released_and_crashed(server, engine, room, durable=False) == 1:
                    break
            else:
                raise AssertionError("no release was lost")
            locks = sl.Locks(engine)
            with pytest.raises(sl.LockTimeout):
                locks.acquire({room: 1}, timeout=0)
            with engine.begin() as connection:
                (holder,) = connection.execute(sl.semaphore.holders(room))
                expire(connection, holder)
            later = locks.acquire({room: 1}, timeout=PATIENCE)
            assert later.fence[room] > holder.fence
            locks.release(later)
            assert released_and_crashed(server, engine, room, durable=True) == 0


def released_and_crashed(server: real.PostgreSQL, engine: Engine, room: str, *, durable: bool) -> int:
    """Release a lease, let the server crash, and return how many permits are held once it runs again."""
    locks = sl.Locks(engine, durable_release=durable)
    grant = locks.acquire({room: 1}, ttl=3600, timeout=PATIENCE)
    assert locks.release(grant) is sl.Released.RELEASED
    server.kill()
    server.start()
    engine.dispose()
    with engine.connect() as connection:
        (row,) = connection.execute(sl.semaphore.usage(room))
        return int(row.used)

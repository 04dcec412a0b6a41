"""What an app does when its transactions begin, such as choosing a tenant's schema: ``Locks`` and workers do it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import Session, sessionmaker

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade.lease import LeaseRenewer
from tests.conformance.faces import ASYNC, SYNC, opened
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import INNODB, connected, installed, unused

ACME = "SET LOCAL search_path TO acme"
SETTINGS = "SELECT current_setting('search_path'), current_setting('transaction_isolation')"


def on_engine(engine: Engine, maker: Any) -> None:
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(ACME))


def on_connection(engine: Engine, maker: Any) -> None:
    event.listen(engine, "engine_connect", lambda connection: on_engine(connection, maker))


def on_session(engine: Engine, maker: Any) -> None:
    event.listen(maker, "after_begin", lambda session, transaction, connection: connection.exec_driver_sql(ACME))


def begun(engine: Engine, maker: Any) -> None:
    event.listen(engine, "engine_connect", lambda connection: connection.exec_driver_sql(ACME))


def begun_at_checkout(engine: Engine, maker: Any) -> None:
    @event.listens_for(engine, "checkout")
    def checkout(raw: Any, *_: Any) -> None:
        cursor = raw.cursor()
        cursor.execute(ACME)
        cursor.close()


ALL: list[Callable[[Engine, Any], None]] = [on_engine, on_connection, on_session, begun, begun_at_checkout]
SERIALIZABLE = "-c default_transaction_isolation=serializable"
DRIVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "psycopg": (SYNC, {}),
    "psycopg, serializable": (SYNC, {"connect_args": {"options": SERIALIZABLE}}),
    "psycopg2, serializable": (SYNC, {"isolation_level": "SERIALIZABLE"}),
    "psycopg, async": (ASYNC, {"isolation_level": "REPEATABLE READ"}),
    "asyncpg": (ASYNC, {}),
    "asyncpg, serializable": (
        ASYNC,
        {"connect_args": {"server_settings": {"default_transaction_isolation": "serializable"}}},
    ),
}
BEGINNINGS = [
    (driver, begin)
    for driver in DRIVERS
    for begin in (ALL if driver in ("psycopg", "asyncpg, serializable") else [on_session, begun])
]


@pytest.mark.parametrize(("driver", "begin"), BEGINNINGS)
def test_locks_keep_the_mode_that_the_app_has_chosen(servers: Any, driver: str, begin: Any) -> None:
    face, options = DRIVERS[driver]
    own: Any = type("Own", (Session,), {})
    key, queue = unused(), sl.Queue()
    settings: list[Any] = []

    def look(connection: Connection, cursor: Any, sql: str, *_: Any) -> None:
        if "lock." in sql:
            cursor.execute(SETTINGS)
            settings.append((*cursor.fetchone(), sql))

    url = installed(servers, "postgresql15", driver.partition(",")[0])
    with opened(face, url, maker=True, session_class=own, **options) as (locks, engine):
        begin(engine, own)
        event.listen(engine, "before_cursor_execute", look)
        assert locks.mutex.acquire(key)
        assert not locks.mutex.acquire(key)
        assert locks.once_per(key, every=3600)
        locks.run(queue.put({"key": key}, queue=key))
        (job,) = locks.run(queue.capture(1, queue=key))
        assert locks.run(queue.complete(job)) == 1
        locks.run(sl.semaphore.create(key, capacity=1))
        with locks.semaphore(key, ttl=60) as grant:
            grant.check()
            with pytest.raises(sl.LockTimeout):
                locks.acquire({key: 1}, timeout=0.02)
        with locks.lease(f"lease of {key}", ttl=60) as grant:
            if face == SYNC:
                renewer = LeaseRenewer(locks)
                assert renewer.renew_batch([grant])
                renewer.take_pool().dispose()  # type: ignore[union-attr]
        with locks.exclusive(key, timeout=5) as held:
            assert str(held.session.scalar(text("SHOW search_path"))) == "acme"
        assert len(settings) > 9
        assert [row for row in settings if row[:2] != ("acme", "read committed")] == []


@pytest.mark.parametrize("what", ["engine_connect", "checkout"])
def test_a_transaction_that_has_read_above_read_committed_is_refused(engine_to: MakeEngine, what: str) -> None:
    """Its level is fixed, and a ROLLBACK would undo what the listener has set."""
    engine, key = engine_to("postgresql15", isolation_level="SERIALIZABLE"), unused()

    def read(connection: Any, *_: Any) -> None:
        cursor = connection.connection.cursor() if what == "engine_connect" else connection.cursor()
        cursor.execute("SELECT set_config('search_path', 'acme', true)")
        cursor.close()

    event.listen(engine, what, read)
    locks = sl.Locks(engine)
    for call in (lambda: locks.mutex.acquire(key), lambda: locks.exclusive(key).__enter__()):
        with pytest.raises(sl.Unsupported, match="in a listener of"):
            call()
    event.remove(engine, what, read)
    assert locks.mutex.acquire(key)


@pytest.mark.parametrize("begin", ["begin", "engine_connect", "after_begin"])
@pytest.mark.parametrize("name", INNODB)
def test_locks_work_in_the_database_that_the_app_has_chosen(
    servers: Servers, engine_to: MakeEngine, name: str, begin: str
) -> None:
    """A lock's key is a row there, too."""
    url, key, queue = servers.fresh(name, PLAIN[name]), unused(), sl.Queue()
    install(url)
    own: Any = type("Own", (Session,), {})
    with connected(url) as tenant, tenant.connect() as other, sl.Locks(tenant).exclusive(f"{key}, held"):
        engine = engine_to(name)
        event.listen(
            own if begin == "after_begin" else engine,
            begin,
            lambda *given: given[-1].exec_driver_sql(f"USE {tenant.url.database}"),
        )
        locks = sl.Locks(sessionmaker(engine, class_=own))
        with locks.exclusive(key, timeout=5):
            assert other.scalar(sl.lock.try_exclusive(key)) is False
            other.rollback()
        with pytest.raises(sl.LockTimeout), locks.exclusive(f"{key}, held", timeout=0):
            pass
        assert locks.mutex.acquire(key)
        assert other.scalar(sl.Mutex().acquire(key)) is False
        other.rollback()
        locks.run(queue.put({}, queue=key))
        assert len(other.execute(queue.capture(1, queue=key)).all()) == 1
        other.rollback()
        with locks.lease(key, ttl=60) as grant:
            assert other.scalar(sl.semaphore.renew(grant))
            other.rollback()
            with pytest.raises(sl.LockTimeout):
                locks.acquire({key: 1}, timeout=1.1)

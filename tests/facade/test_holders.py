"""Holders of keys and their waiters, from the server's own tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, make_url, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import installation
from sqlalchemy_locks.facade.semaphore_wait import ServerQueue
from sqlalchemy_locks.keys import queue_keys
from tests.conformance import faces
from tests.conformance.faces import opened
from tests.conftest import PLAIN, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ASYNC, PATIENCE, SERVERS, Watch, connected, installed, later, unused

TOLD = [*SERVERS, "postgresql18"]


def holders_of(engine: Engine, *names: str | int) -> list[sl.KeyHolder]:
    return sl.Locks(engine).run(sl.lock.holders(*names))


def contended(engine: Engine, watch: Watch, holder: Connection, waiter: Connection, name: Any, shared: bool) -> Any:
    """Hold a key, and have another connection wait for it."""
    sl.Locks(engine).run(sl.lock.create(name))
    holder.execute((sl.lock.shared if shared else sl.lock.exclusive)(name))
    waiting = later(waiter.execute, sl.lock.exclusive(name))
    watch.until_waiting(waiting)
    return waiting


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", TOLD)
def test_holders_and_waiters(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, shared: bool) -> None:
    engine, key = engine_to(name), unused()
    with closing(engine.connect()) as holder, closing(engine.connect()) as waiter:
        started = datetime.now(timezone.utc)
        waiting = contended(engine, watch(name), holder, waiter, key, shared)
        try:
            (one,) = holders_of(engine, unused("another"), key)
        finally:
            holder.rollback()
        waiting.result(PATIENCE)
        waiter.rollback()
        assert (one.name, one.key, one.mode) == (key, sl.lock.key(key), "shared" if shared else "exclusive")
        assert one.session == watch(name).backend(holder)
        assert one.user == "locks"
        assert one.host is not None
        assert one.host.startswith("127.0.0.1")
        (then,) = one.waiting
        assert (then.mode, then.session) == ("exclusive", watch(name).backend(waiter))
        assert then.waits_for == (one.session,)
        # both clocks are this machine's; MariaDB's table has whole seconds
        for since in (one.since, then.since):
            assert since is not None
            assert since.tzinfo is timezone.utc
            assert started - timedelta(seconds=2) < since < datetime.now(timezone.utc) + timedelta(seconds=1)
        assert str(one.session) in str(one)


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_holders_in_the_database_of_a_schema_translate_map(
    servers: Any, engine_to: MakeEngine, watch: Callable[[str], Watch], name: str
) -> None:
    """Each tenant has its own keys, and sees the holders of these."""
    url, key = servers.fresh(name, PLAIN[name]), unused()
    install(url)
    acme = engine_to(name, execution_options={"schema_translate_map": {None: make_url(url).database}})
    other = sl.Locks(engine_to(name))
    with closing(acme.connect()) as holder, closing(acme.connect()) as waiter:
        waiting = contended(acme, watch(name), holder, waiter, key, False)
        try:
            session = watch(name).backend(holder)
            assert [one.session for one in holders_of(acme, key)] == [session]
            assert session in [one.session for one in holders_of(acme)]
            with pytest.raises(sl.LockTimeout) as raised, sl.Locks(acme).exclusive(key, timeout=1):
                pass
            assert [one.session for one in raised.value.holders] == [session]
            with other.exclusive(key, timeout=0):  # another database's key
                assert session not in [one.session for one in holders_of(other._engine, key)]
        finally:
            holder.rollback()
        waiting.result(PATIENCE)
    # a queue of waiters for permits whose only waiter is its first one
    sl.Locks(acme).run(sl.semaphore.create("s", 1))
    (queue_key,) = queue_keys(installation(acme), ["s"])
    with ServerQueue(acme, queue_key, lambda connection: None) as queue:
        assert queue.join(5.0)
        first = [(one.kind, one.name, one.waiting) for one in holders_of(acme) if one.kind != "lock"]
        assert first == [("semaphore", "s", ())]


@pytest.mark.parametrize("name", ["postgresql15", "postgresql18", "mysql"])
def test_uncontended_key_is_listed(engine_to: MakeEngine, name: str) -> None:
    engine, key = engine_to(name), unused()
    sl.Locks(engine).run(sl.lock.create(key))
    with engine.connect() as one, engine.connect() as other:
        one.execute(sl.lock.shared(key))
        other.execute(sl.lock.shared(key))
        assert [(holder.mode, holder.waiting) for holder in holders_of(engine, key)] == [("shared", ())] * 2
        other.rollback()
        one.execute(sl.lock.exclusive(key))
        # listed once, although it holds the key in both modes
        assert [holder.mode for holder in holders_of(engine, key)] == ["exclusive"]
        one.rollback()
        assert holders_of(engine, key) == []


@pytest.mark.parametrize("name", ["postgresql15", "postgresql18"])
def test_owner_is_the_application_name(engine_to: MakeEngine, name: str) -> None:
    engine, key = engine_to(name, connect_args={"application_name": "billing"}), unused()
    with Session(engine) as session, session.begin():
        session.execute(sl.lock.exclusive(key))
        (one,) = session.scalars(sl.lock.holders(key)).all()
        assert one.owner == "billing"
        assert "billing" in str(one)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("sqlite", "on SQLite, where no table of the server lists them"),
        ("postgresql15-table", "where the table bodies are installed, as on YugabyteDB"),
        ("yugabytedb", "where no table of the server lists them"),
    ],
)
def test_unsupported_where_the_server_lists_no_locks(engine_to: MakeEngine, name: str, sentence: str) -> None:
    with pytest.raises(sl.Unsupported, match=sentence) as refused:
        holders_of(engine_to(name), "a")
    assert "PostgreSQL" not in str(refused.value)  # a postgresql:// URL leads to YugabyteDB as well


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_missing_privilege_is_named(engine_to: MakeEngine, servers: Any, name: str) -> None:
    admin = engine_to(name)
    user = f"looks{admin.url.database}"[:32]
    with admin.begin() as connection:
        connection.execute(text(f"CREATE USER '{user}'@'%' IDENTIFIED BY 'x'"))
        keys = f"{admin.url.database}.lock_locked_keys"
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {keys} TO '{user}'@'%'"))
    try:
        url = admin.url.set(username=user, password="x").render_as_string(hide_password=False)
        with connected(url) as engine, pytest.raises(sl.Unsupported, match="needs SELECT on performance_schema"):
            holders_of(engine, "a")
        with admin.begin() as connection:
            needed = "SELECT ON performance_schema.*" if name == "mysql" else "PROCESS ON *.*"
            connection.execute(text(f"GRANT {needed} TO '{user}'@'%'"))
        with connected(url) as engine:
            holders_of(engine)  # without the queues of semaphores, whose table this user can't read
    finally:
        with admin.begin() as connection:
            connection.execute(text(f"DROP USER '{user}'@'%'"))


@pytest.mark.parametrize("which", [which for which in ASYNC if not which.startswith("sqlite")])
def test_async_holders(servers: Any, which: str) -> None:
    name, driver = ASYNC[which]
    with opened(faces.ASYNC, installed(servers, name, driver)) as (locks, _):
        key = unused()
        locks.run(sl.lock.create(key))
        with locks.exclusive(key):
            # MariaDB lists only keys with waiters
            names = [one.name for one in locks.run(sl.lock.holders(key))]
            assert names == ([] if name == "mariadb" else [key])


def test_other_role_sees_only_that_it_is_held(engine_to: MakeEngine, servers: Any) -> None:
    admin, key = engine_to("postgresql15"), unused()
    user = f"looks_{admin.url.database}"
    with admin.begin() as connection:
        connection.execute(text(f"CREATE ROLE {user} LOGIN"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA lock TO {user}"))
        connection.execute(text(f"GRANT SELECT ON lock.locked_keys TO {user}"))
    try:
        url = admin.url.set(username=user).render_as_string(hide_password=False)
        with connected(url) as engine, sl.Locks(admin).exclusive(key):
            (one,) = holders_of(engine, key)
            assert (one.name, one.mode, one.since) == (key, "exclusive", None)
            assert one.session is not None
    finally:
        with admin.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {user}; DROP ROLE {user}"))

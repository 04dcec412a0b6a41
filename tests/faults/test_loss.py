"""A lock is gone with its holder's process, session or server, and the connection is as the app has left it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, event, text

import sqlalchemy_locks as sl
from tests import servers as real
from tests.conftest import PLAIN, Servers, install
from tests.faults.drivers import ONE, good_as_new, sync
from tests.fixtures.engines import MakeEngine
from tests.fixtures.holders import Process, hold_key
from tests.fixtures.parties import PATIENCE, Watch, all_of, backend_statement, connected


@pytest.mark.parametrize("name", [*PLAIN])
def test_killed_process_releases_its_lock(servers: Servers, engine_to: MakeEngine, name: str) -> None:
    locks = sl.Locks(engine_to(name, poolclass=NullPool))
    with Process(hold_key, servers.installed(name, PLAIN[name]), "of a process") as holder:
        assert (holder.first, holder.hear()) == ("asks", "holds")
        with pytest.raises(sl.LockTimeout):
            with locks.exclusive("of a process", timeout=0):
                pass
    with locks.exclusive("of a process", timeout=PATIENCE):
        pass


@sync
@pytest.mark.parametrize("checks", [True, False], ids=["check", "exit"])
def test_terminated_session_is_a_lost_lock(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, driver: str, checks: bool
) -> None:
    engine, watched = engine_to(name, driver, **ONE), watch(name)
    locks, told = sl.Locks(engine), list[sl.LockEvent]()
    for what in ("waited", "acquired", "released", "lost", "retried"):
        event.listen(locks, what, told.append)
    with pytest.raises(sl.LockLost) as raised:
        with locks.exclusive("cut") as held:
            watched.kill(held.session.scalar(text(backend_statement(name))))
            with sl.Locks(watched.engine).exclusive("cut", timeout=PATIENCE):  # free for others by now
                if checks:
                    with pytest.raises(sl.LockLost):
                        held.check()
                    assert held.lost
    # PostgreSQL's drivers see the end of a session at its next statement only, which may be the COMMIT
    if checks or name in ("mysql", "mariadb"):
        assert type(raised.value) is sl.LockLost
        assert str(raised.value).endswith("what was done in it after that is not committed")
    if checks:
        assert [one.event for one in told] == ["waited", "acquired", "lost", "released"]
        assert all(isinstance(one.error, sl.LockLost) for one in told[2:])
    good_as_new(locks, engine)


LEVEL = {
    "postgresql15": "SELECT current_setting('transaction_isolation')",
    "yugabytedb": "SELECT current_setting('transaction_isolation')",
    "mysql": "SELECT lower(@@transaction_isolation)",
    "mariadb": "SELECT lower(@@tx_isolation)",
}


def app_settings(engine: Engine, name: str) -> tuple[Any, ...]:
    """What an app finds on the connection that it gets."""
    wait = "SELECT @@innodb_lock_wait_timeout" if name in ("mysql", "mariadb") else "SHOW lock_timeout"
    with engine.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        autocommit = raw.get_autocommit() if hasattr(raw, "get_autocommit") else raw.autocommit
        level = str(connection.scalar(text(LEVEL[name]))).replace("-", " ")
        return level, connection.scalar(text(wait)), bool(autocommit)


@sync
@pytest.mark.parametrize("how", ["option", "event", "autocommit"])
def test_settings_of_the_app_are_restored(engine_to: MakeEngine, name: str, driver: str, how: str) -> None:
    if how == "event" and name in ("postgresql15", "yugabytedb"):
        pytest.skip("SQLAlchemy restores the level of the engine: a level belongs there")
    level = {"option": "SERIALIZABLE", "event": None, "autocommit": "AUTOCOMMIT"}[how]
    engine = engine_to(name, driver, **ONE, **({"isolation_level": level} if level else {}))
    other = sl.Locks(engine_to(name, poolclass=NullPool))
    if how == "event":

        @event.listens_for(engine, "connect")
        def serializable(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            cursor.close()
            connection.commit()

    before = app_settings(engine, name)
    assert how == "autocommit" or before[0] == "serializable"
    locks = sl.Locks(engine)
    with locks.exclusive("settings"), other.exclusive("taken by another"):
        pass
    assert app_settings(engine, name) == before
    with locks.exclusive("settings", timeout=PATIENCE) as held:
        level_inside = str(held.session.scalar(text(LEVEL[name])))
        # MySQL's variable tells the session's level, not the transaction's
        assert level_inside == "read committed" or name in ("mysql", "mariadb")
    assert app_settings(engine, name) == before
    with other.exclusive("settings"):
        for timeout in (0, 0.1):
            with pytest.raises(sl.LockTimeout):
                with locks.exclusive("settings", timeout=timeout):
                    pass
    assert app_settings(engine, name) == before
    with pytest.raises(KeyError):
        with locks.exclusive("settings", timeout=PATIENCE):
            raise KeyError
    locks.run(sl.lock.vacuum())
    assert app_settings(engine, name) == before


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_block_works_after_a_server_restart(name: str) -> None:
    server: Any = real.start(name)
    with server:
        server.create_database("restarted")
        url = server.url(PLAIN[name], "restarted")
        install(url)
        with connected(url, **ONE) as engine:
            locks = sl.Locks(engine)
            with pytest.raises(sl.LockLost):
                with locks.exclusive("restart"):
                    server.restart()
            good_as_new(locks, engine)


def test_blocks_with_keys_in_another_order_never_deadlock(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine_to("postgresql15"))

    def work(*names: str) -> None:
        for _ in range(100):
            with locks.exclusive(*names, timeout=PATIENCE):
                pass

    all_of(*[partial(work, "first", "second"), partial(work, "second", "first")] * 2)

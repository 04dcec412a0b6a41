"""A holder that is disconnected, stopped or forked: it knows of the loss, or is refused; never do two write."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, select

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime.renewal import clock
from tests import servers as real
from tests.conftest import PLAIN, install
from tests.facade.test_lease_block import document
from tests.faults.drivers import sync, through_a_proxy
from tests.fixtures.engines import MakeEngine
from tests.fixtures.holders import DOCUMENT, Process, hold_lease, write
from tests.fixtures.parties import PATIENCE, connected, installed, until
from tests.fixtures.renewal_threads import due, renewers
from tests.fixtures.semaphores import expire, unused

__all__ = ["document"]


def free(engine: Engine, lease: str) -> None:
    """The name can be acquired again, and nothing is left for the sweeps of other tests."""
    locks = sl.Locks(engine)
    assert locks.release(locks.acquire({lease: 1}, ttl=3600, timeout=PATIENCE)) is sl.Released.RELEASED


@pytest.mark.parametrize("name", ["postgresql15", "mariadb"])
def test_process_stopped_past_ttl_knows_immediately(
    name: str, servers: Any, engine_to: MakeEngine, document: Any
) -> None:
    engine, lease = engine_to(name), unused("lease")
    document(engine)
    with Process(hold_lease, installed(servers, name), lease, 2) as holder:
        with holder.stopped():
            # it expires by the server's clock, and another client acquires it
            next_one = sl.Locks(engine).acquire({lease: 1}, ttl=3600, timeout=PATIENCE)
            assert sl.Locks(engine).run(sl.guarded(write("the next one's"), next_one)) is True
            holder.tell("lost")
            holder.tell("write")
            holder.tell("check")
        assert [holder.hear() for _ in range(3)] == ["True", "refused", "lost"]
        assert holder.asked("leave") == "left"
    with engine.connect() as connection:
        assert connection.scalar(select(DOCUMENT.c.body)) == "the next one's"
    assert sl.Locks(engine).release(next_one) is sl.Released.RELEASED


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("postgresql15", "write slowly"),
        ("yugabytedb", "write slowly"),
        ("mysql", "write in a block"),
        ("mariadb", "write in a block"),
    ],
)
def test_process_stopped_in_its_guarded_write_is_replaced(
    name: str, word: str, servers: Any, engine_to: MakeEngine, document: Any
) -> None:
    engine, lease = engine_to(name), unused("lease")
    document(engine)
    with Process(hold_lease, installed(servers, name), lease, 1) as holder:
        assert holder.asked(word) == "not committed yet"
        with holder.stopped():
            # the server ends its transaction, which locks the row of its request
            next_one = sl.Locks(engine).acquire({lease: 1}, ttl=3600, timeout=PATIENCE)
            assert sl.Locks(engine).run(sl.guarded(write("the next one's"), next_one)) is True
        assert [holder.asked(word) for word in ("commit", "leave")] == ["disconnected", "left"]
    with engine.connect() as connection:
        assert connection.scalar(select(DOCUMENT.c.body)) == "the next one's"
    assert sl.Locks(engine).release(next_one) is sl.Released.RELEASED


def test_process_stopped_within_ttl_still_holds(servers: Any, engine_to: MakeEngine, document: Any) -> None:
    name = "postgresql15"
    engine, lease = engine_to(name), unused("lease")
    document(engine)
    with Process(hold_lease, installed(servers, name), lease, 3600) as holder:
        with holder.stopped(), pytest.raises(sl.LockTimeout):
            sl.Locks(engine).acquire({lease: 1}, timeout=0)
        answers = [holder.asked(word) for word in ("lost", "check", "write", "leave")]
        assert answers == ["False", "held", "written", "left"]
    free(engine, lease)


def test_fork_is_not_the_holder(servers: Any, engine_to: MakeEngine) -> None:
    engine, lease = engine_to("postgresql15"), unused("lease")
    with Process(hold_lease, installed(servers, "postgresql15"), lease, 3600) as holder:
        assert holder.asked("fork") == "lost True raised, its own False"
        # it still holds what the fork left
        assert [holder.asked(word) for word in ("lost", "check")] == ["False", "held"]
        with pytest.raises(sl.LockTimeout):
            sl.Locks(engine).acquire({lease: 1}, timeout=0)
        assert holder.asked("leave") == "left"


@sync
def test_unreachable_server_loses_lease(servers: Any, name: str, driver: str) -> None:
    lease = unused("lease")
    with through_a_proxy(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        with pytest.raises(KeyError), locks.lease(lease, ttl=3600) as grant:
            proxy.close()
            proxy.cut()
            grant.lost.deadline = clock() + 1
            due(locks)
            assert grant.lost.wait(PATIENCE)
            assert grant.lost
            raise KeyError("the user's own")
        until(lambda: not renewers())
    with connected(installed(servers, name)) as plain:
        # it expires, and no client has to release it
        with plain.begin() as connection:
            expire(connection, grant)
        free(plain, lease)


def test_server_restart_loses_no_lease() -> None:
    name = "postgresql15"
    with real.start(name) as server:
        assert isinstance(server, real.SQLServer)
        server.create_database("restarted")
        url = server.url(PLAIN[name], "restarted")
        install(url)
        with connected(url) as engine, sl.Locks(engine).lease("restart", ttl=3600) as grant:
            server.restart()
            sl.Locks(engine).renew(grant)
            grant.check()
            with pytest.raises(sl.LockTimeout):
                sl.Locks(engine).acquire({"restart": 1}, timeout=0)

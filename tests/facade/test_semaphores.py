"""``Locks`` and ``AsyncLocks`` with semaphores: waiting, the queue in memory, sweeping, a complete example."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime.local_queue import LocalQueues, local_queues
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, later, until
from tests.fixtures.semaphores import BRIEFLY, ENGINES, SERVERS, held, made, place, request_of, unused


@pytest.mark.parametrize("name", ENGINES)
def test_waiter_is_served_when_there_is_room(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    first = locks.acquire({sem: 1})
    with pytest.raises(sl.LockTimeout, match=r"had no room \(timeout=0\)"):
        locks.acquire({sem: 1}, timeout=0)
    with pytest.raises(sl.LockTimeout, match=r"had no room within 0.05 s"):
        locks.acquire({sem: 1}, timeout=0.05)
    waiting = later(locks.acquire, {sem: 1}, timeout=PATIENCE)
    locks.release(first)
    assert waiting.result(PATIENCE).fence == {sem: 2}
    with pytest.raises(sl.UnknownSemaphore, match="there is no semaphore"):
        locks.acquire({unused("nothing"): 1})


def test_one_thread_waits_on_a_connection(engine_to: MakeEngine, watch: Any) -> None:
    """Ten threads acquire a semaphore whose row is locked: one waits on a connection, nine wait in memory."""
    engine, watcher = engine_to("postgresql15", pool_size=20), watch("postgresql15")
    sem = made(engine, 20)
    with engine.connect() as keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        waiting = [later(sl.Locks(engine).acquire, {sem: 1}, timeout=PATIENCE) for _ in range(10)]
        watcher.until_waiting()
        until(lambda: visitors(local_queues(engine.dialect)) == 10)
        assert engine.pool.checkedout() == 2  # type: ignore[attr-defined]
        keeper.commit()
    assert all(future.result(PATIENCE) for future in waiting)
    assert local_queues(engine.dialect).front == {}
    assert held(engine, sem) == 11


def visitors(lines: LocalQueues) -> int:
    return sum(1 + len(ticket.behind or ()) for (key, _), ticket in list(lines.front.items()) if key[0] == "rows")


@pytest.mark.parametrize("name", ENGINES)
def test_sweep_of_dead_owners(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 10)
    locks = sl.Locks(engine)
    dead, living = unused("dead"), unused("living")
    grants = {owner: [locks.acquire({sem: 1}, owner=owner) for _ in range(3)] for owner in (dead, living)}
    asked: list[str] = []

    def explode(owners: list[str]) -> list[str]:
        raise RuntimeError("the orchestrator is down")

    with pytest.raises(RuntimeError, match="orchestrator"):
        locks.sweep(alive=explode)
    for nonsense in (lambda owners: None, lambda owners: "everybody", lambda owners: True, lambda owners: [True]):
        with pytest.raises(TypeError, match="alive returns those of the given owners"):
            locks.sweep(alive=nonsense)  # type: ignore[arg-type]
    assert held(engine, sem) == 6

    def alive(owners: list[str]) -> list[str]:
        asked.extend(owners)
        return [owner for owner in owners if owner != dead]

    assert locks.sweep(alive=alive) >= 3
    assert sorted(asked) == sorted(set(asked))
    assert {dead, living} <= set(asked)
    assert [locks.renew(grant) for grant in grants[living]] == [True] * 3
    assert [locks.release(grant) for grant in grants[dead]] == [sl.Released.ALREADY_RELEASED] * 3


@pytest.mark.parametrize("name", ENGINES)
def test_sweep_finishes_half_a_release(name: str, engine_to: MakeEngine) -> None:
    """The holder freed the permits and died before it ended the request, as a release without a transaction may."""
    engine = engine_to(name)
    sem = made(engine, 1)
    locks = sl.Locks(engine)
    grant = locks.acquire({sem: 1})
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE {place(engine, 'permit')} SET state = 'RELEASED' WHERE permit_request_id = :id"),
            {"id": request_of(engine, grant)},
        )
    assert locks.sweep(stale_after=None) >= 1
    assert locks.release(grant) is sl.Released.ALREADY_RELEASED


@pytest.mark.parametrize("name", [*SERVERS, "yugabytedb"])
def test_change_of_semaphore_respects_locks_wait(name: str, engine_to: MakeEngine) -> None:
    """A bounded wait, in a session and through ``Locks``; no setting is left changed."""
    engine = engine_to(name, isolation_level="READ COMMITTED", pool_size=9)
    setting = "SELECT @@innodb_lock_wait_timeout" if name in ("mysql", "mariadb") else "SHOW lock_timeout"
    sem, new = made(engine, 2), unused("semaphore")
    changes = [sl.semaphore.resize(sem, 3), sl.semaphore.delete(sem), sl.semaphore.create(new, 1)]
    with engine.connect() as other, engine.connect() as keeper:
        assert keeper.scalar(sl.semaphore.acquire({sem: 1}))
        assert keeper.scalar(sl.semaphore.create(new, 2))
        before = other.exec_driver_sql(setting).scalar()
        bounded = [change.execution_options(locks_wait=BRIEFLY[name]) for change in changes]

        def in_a_session(change: Any) -> None:
            with engine.connect() as own:
                own.scalar(change)

        for way in (in_a_session, sl.Locks(engine).run):
            for waiting in [later(way, change) for change in bounded]:
                with pytest.raises(sl.LockTimeout):
                    waiting.result(PATIENCE)
        with ExitStack() as opened:
            pooled = [opened.enter_context(engine.connect()) for _ in range(engine.pool.checkedin())]  # type: ignore[attr-defined]
            assert {connection.exec_driver_sql(setting).scalar() for connection in pooled} == {before}
        keeper.rollback()
        for change in changes:
            other.scalar(change.execution_options(locks_wait=PATIENCE))
            assert other.exec_driver_sql(setting).scalar() == before
        other.rollback()

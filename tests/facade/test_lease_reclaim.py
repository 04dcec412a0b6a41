"""reclaim: the id of a dead holder is granted again to one caller, after the ttl has expired and never before."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from sqlalchemy import column, event, table, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.runtime.renewal import clock
from tests.conftest import Servers
from tests.faults.drivers import clear, through_a_proxy
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import EVERYWHERE, PATIENCE, all_of, later, until, unused
from tests.fixtures.semaphores import expire_in, held, made, place


def died(locks: sl.Locks, name: str, ident: str) -> sl.Grant:
    """The grant of a process that no longer renews it, an hour before it expires."""
    return locks.acquire({name: 1}, external_id=ident, ttl=3600)


def again(locks: sl.Locks, name: str, ident: str, **options: Any) -> Any:
    return locks.semaphore(name, external_id=ident, ttl=3600, timeout=PATIENCE, resume=False, reclaim=True, **options)


def test_block_without_an_id_recognizes_its_own_grant(servers: Servers) -> None:
    """No other caller has its generated id: a grant whose reply was lost is the block's own."""
    with through_a_proxy(servers, "postgresql15", "psycopg2", **clear("psycopg2")) as (engine, proxy):
        locks = sl.Locks(engine)
        room = made(engine, 1)
        proxy.lose_answer(b"semaphore_acquire")
        with locks.semaphore(room, ttl=3600, timeout=PATIENCE, resume=False) as grant:
            assert (proxy.losses, grant.permits) == (1, {room: 1})
            assert held(engine, room) == 1
        assert held(engine, room) == 0


@pytest.mark.parametrize("swept", [False, True], ids=["expired", "swept"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_expired_id_is_granted_again(name: str, swept: bool, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    dead = died(locks, room, ident)
    with pytest.raises(sl.RequestHeld):
        with again(locks, room, ident):
            raise AssertionError("its time isn't over")
    expire_in(engine, dead)
    if swept:
        assert locks.sweep() >= 1
    with pytest.raises(sl.RequestOver):
        with locks.semaphore(room, external_id=ident, resume=False):
            raise AssertionError("it was not asked for")
    with again(locks, room, ident) as grant:
        assert grant.fence[room] > dead.fence[room]
        grant.check()
        assert held(engine, room) == 1
        # the dead holder resumes: none of its calls affects the new request
        assert locks.release(dead) is sl.Released.UNKNOWN
        assert locks.renew(dead) is False
        write = update(table("lock_nothing", column("id"))).values(id=1)
        with pytest.raises(sl.LockLost):
            locks.run(sl.guarded(write, dead))
        grant.check()
        with pytest.raises(sl.RequestHeld):
            with again(sl.Locks(engine_to(name)), room, ident):
                raise AssertionError("it is held")
    # and now it is done
    with pytest.raises(sl.RequestOver):
        with again(locks, room, ident):
            raise AssertionError("it was done")


@pytest.mark.parametrize("name", EVERYWHERE)
def test_released_id_is_not_reclaimed(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    locks.release(died(locks, room, ident))
    endless = unused("request")  # without a time to live it never expires
    locks.release(locks.acquire({room: 1}, external_id=endless))
    for one in (ident, endless):
        with pytest.raises(sl.RequestOver) as over:
            with again(locks, room, one):
                raise AssertionError("it was done")
        assert over.value.state == "RELEASED"


class OfTheApp(Exception):
    pass


@pytest.mark.parametrize("reclaim", [True, False])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_id_of_a_block_that_raised_is_granted_again(name: str, reclaim: bool, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    options: dict[str, Any] = {"external_id": ident, "ttl": 3600, "resume": False, "reclaim": reclaim}
    with pytest.raises(OfTheApp):
        with locks.semaphore(room, **options) as failed:
            assert held(engine, room) == 1
            raise OfTheApp
    assert held(engine, room) == 0
    if reclaim:
        with locks.semaphore(room, **options) as grant:
            assert grant.fence[room] > failed.fence[room]
            # what the first attempt left running can't write any more
            with pytest.raises(sl.LockLost):
                locks.run(sl.guarded(update(table("lock_nothing", column("id"))).values(id=1), failed))
            assert locks.release(failed) is sl.Released.UNKNOWN
    with pytest.raises(sl.RequestOver):
        with locks.semaphore(room, **options):
            raise AssertionError("it was done")


@pytest.mark.parametrize("name", EVERYWHERE)
def test_reclaimed_id_may_have_other_permits(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    locks, room, other, ident = sl.Locks(engine), made(engine, 1), made(engine, 1), unused("request")
    expire_in(engine, died(locks, room, ident))
    with pytest.raises(sl.IdempotencyConflict):
        with again(locks, other, ident):
            raise AssertionError("it stands for another")


@pytest.mark.parametrize("name", EVERYWHERE)
def test_one_of_concurrent_reclaims_enters(name: str, engine_to: MakeEngine) -> None:
    """Each waiter has an engine of its own, as another process would; the capacity suffices for all of them."""
    engine = engine_to(name)
    locks, room = sl.Locks(engine), made(engine, 4)
    parties = [sl.Locks(engine_to(name)) for _ in range(4)]
    for turn in range(10):
        ident, ready = unused("request"), threading.Barrier(4, timeout=PATIENCE)
        decided = threading.Barrier(4, timeout=PATIENCE)
        expire_in(engine, died(locks, room, ident))
        if turn % 2:
            locks.sweep()

        def one(mine: sl.Locks, ident: str = ident, ready: Any = ready, decided: Any = decided) -> str:
            ready.wait()
            try:
                with again(mine, room, ident):
                    decided.wait()  # a holder stays until every waiter has its result
                    return "worked"
            except sl.RequestHeld:
                decided.wait()
                return "held"
            except BaseException:
                decided.abort()
                raise

        assert sorted(all_of(*(lambda mine=mine: one(mine) for mine in parties))) == ["held"] * 3 + ["worked"]
        assert held(engine, room) == 0


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_reclaim_waits_for_guarded_write(name: str, engine_to: MakeEngine) -> None:
    """Whatever the server's own limit is: the dead holder may have been stopped in a guarded write."""
    engine = engine_to(name)
    if name != "postgresql15":
        engine = engine_to(name, connect_args={"init_command": f"SET innodb_lock_wait_timeout={PATIENCE}"})
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    dead = died(locks, room, ident)
    expire_in(engine, dead)
    share = "FOR SHARE" if name == "postgresql15" else "LOCK IN SHARE MODE"
    writes = f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id {share}"
    with engine.begin() as writing:
        assert writing.scalar(text(writes), {"id": ident})
        for timeout, within in ((1, "within 1 s"), (0, r"\(timeout=0\)")):
            with pytest.raises(sl.LockTimeout, match=within) as late:
                with locks.semaphore(room, external_id=ident, timeout=timeout, resume=False, reclaim=True):
                    raise AssertionError("it may still be written")
            assert late.value.kind == "semaphore"
    with again(locks, room, ident) as grant:
        assert grant.fence[room] > dead.fence[room]


def test_reclaim_requires_resume_false(engine_to: MakeEngine) -> None:
    """Otherwise a caller that reclaimed the request and one that resumes it would both work."""
    engine = engine_to("sqlite")
    sent: list[int] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _(*_: Any) -> None:
        sent.append(1)

    locks = sl.Locks(engine)
    with pytest.raises(TypeError, match="reclaim=True is for blocks with resume=False"):
        locks.semaphore("slots", external_id="job-1", reclaim=True)
    assert not sent


def test_late_exit_of_reclaimed_block_is_a_loss(engine_to: MakeEngine) -> None:
    """It had expired before its release, and the release reported that: the next caller is granted the id."""
    engine = engine_to("postgresql15")
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    dead = died(locks, room, ident)
    expire_in(engine, dead)
    assert locks.release(dead) is sl.Released.RELEASED
    with again(locks, room, ident):
        pass


@pytest.mark.parametrize("reclaim", [False, True])
@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_a_lost_reply_of_its_own_is_no_other_caller(name: str, reclaim: bool, servers: Servers) -> None:
    driver = "psycopg2" if name == "postgresql15" else "pymysql"
    with through_a_proxy(servers, name, driver, **clear(driver)) as (engine, proxy):
        room, ident = made(engine, 1), unused("request")
        proxy.lose_answer(b"semaphore_acquire" if name == "postgresql15" else b"\x03COMMIT")
        options: Any = {"external_id": ident, "ttl": 3600, "timeout": PATIENCE, "resume": False, "reclaim": reclaim}
        with sl.Locks(engine).semaphore(room, **options) as grant:
            assert (proxy.losses, grant.replayed, held(engine, room)) == (1, False, 1)
        assert held(engine, room) == 0


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_a_lost_reply_at_the_head_of_the_queue_is_no_other_caller(
    name: str, servers: Servers, engine_to: MakeEngine
) -> None:
    driver = "psycopg2" if name == "postgresql15" else "pymysql"
    direct = sl.Locks(engine_to(name))
    with through_a_proxy(servers, name, driver, pool_size=3, **clear(driver)) as (engine, proxy):
        room, ident = made(engine, 1), unused("request")
        blocker = direct.acquire({room: 1}, ttl=3600)
        looks: list[str] = []
        event.listen(engine, "before_cursor_execute", lambda *given: looks.append(given[2]))
        lost_at: list[float] = []

        def wait() -> tuple[bool, float]:
            locks = sl.Locks(engine)
            with locks.semaphore(room, external_id=ident, ttl=3600, timeout=PATIENCE, resume=False) as grant:
                assert (proxy.losses, held(engine, room)) == (1, 1)
                return grant.replayed, grant.lost.deadline

        waiting = later(wait)
        until(lambda: len(looks) > 10)  # it polls, at the head of the queue
        proxy.lose_answer(b"COMMIT" if name == "postgresql15" else b"\x03COMMIT", lambda: lost_at.append(clock()))
        direct.release(blocker)
        replayed, deadline = waiting.result(PATIENCE)
        assert not replayed
        # its time counts from the attempt whose reply was lost
        assert deadline <= lost_at[0] + 3600
        assert held(engine, room) == 0


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])
@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_id_of_a_block_that_raised_is_free_whatever_request_its_exit_lost(
    name: str, executed: bool, servers: Servers
) -> None:
    """The second attempt to free it must not spend it, if the first one did nothing."""
    driver = "psycopg2" if name == "postgresql15" else "pymysql"
    with through_a_proxy(servers, name, driver, **clear(driver)) as (engine, proxy):
        locks, room, lost = sl.Locks(engine), made(engine, 1), list[bytes]()
        for number in itertools.count(1):
            ident = unused("request")
            with pytest.raises(OfTheApp):
                with again(locks, room, ident):
                    proxy.die_at(number, executed=executed)
                    raise OfTheApp
            fatal = proxy.fatal
            proxy.forget()
            assert held(engine, room) == 0
            with again(locks, room, ident) as grant:
                assert not grant.replayed
            if fatal is None:
                break
            lost.append(fatal)
    assert any(b"COMMIT" in each for each in lost)

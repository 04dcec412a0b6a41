"""The external id of a block: one caller inside at a time, again after it raised or expired, never after it ended."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from sqlalchemy import column, event, table, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade import semaphore_wait
from sqlalchemy_locks.facade.semaphore_wait import SemaphoreWaiter
from sqlalchemy_locks.runtime.renewal import clock
from tests.conftest import Servers
from tests.faults.drivers import clear, through_a_proxy
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES, PATIENCE, SERVERS, all_of, later, until, unused
from tests.fixtures.semaphores import expire_in, held, made, place

#: what each sends last, to be granted permits
GRANTS = {"postgresql15": b"semaphore_acquire", "mysql": b"\x03COMMIT", "mariadb": b"\x03COMMIT"}


def cut_off(servers: Servers, name: str, **options: Any) -> Any:
    """An engine through a proxy that reads its requests."""
    driver = "psycopg2" if name == "postgresql15" else "pymysql"
    return through_a_proxy(servers, name, driver, **clear(driver), **options)


class OfTheApp(Exception):
    pass


def block(locks: sl.Locks, room: str, ident: str, **options: Any) -> Any:
    return locks.semaphore(room, external_id=ident, ttl=3600, **{"timeout": PATIENCE, **options})


def refused(locks: sl.Locks, room: str, ident: str, error: type[Exception]) -> None:
    with pytest.raises(error), block(locks, room, ident):
        raise AssertionError("it was let in")


def harmless(locks: sl.Locks, earlier: sl.Grant) -> None:
    """No call of an earlier holder of the id affects the present one."""
    assert locks.release(earlier) is sl.Released.UNKNOWN
    assert locks.renew(earlier) is False
    with pytest.raises(sl.LockLost):
        locks.run(sl.guarded(update(table("lock_nothing", column("id"))).values(id=1), earlier))


@pytest.mark.parametrize("end", ["expired", "swept", "late", "raised", "released", "ended"])
@pytest.mark.parametrize("name", ENGINES)
def test_id_is_granted_again_unless_its_block_has_ended_well(name: str, end: str, engine_to: MakeEngine) -> None:
    """Late is a release that came after the time to live, and before another caller took the permits."""
    engine = engine_to(name)
    locks, another = sl.Locks(engine), sl.Locks(engine_to(name))
    room, ident = made(engine, 2), unused("request")
    if end in ("raised", "ended"):
        try:
            with block(locks, room, ident) as first:
                for caller in (locks, another):
                    refused(caller, room, ident, sl.RequestHeld)
                assert held(engine, room) == 1
                if end == "raised":
                    raise OfTheApp
        except OfTheApp:
            pass
    else:
        # of a process that has died, or that doesn't use a block
        first = locks.acquire({room: 1}, external_id=ident, ttl=3600)
        refused(another, room, ident, sl.RequestHeld)
        if end != "released":
            expire_in(engine, first)
        if end == "swept":
            assert locks.sweep() >= 1
        elif end != "expired":
            assert locks.release(first) is sl.Released.RELEASED
    if end not in ("released", "ended"):
        with block(another, room, ident) as grant:
            assert grant.fence[room] > first.fence[room]
            harmless(locks, first)
            grant.check()
            assert held(engine, room) == 1
            refused(locks, room, ident, sl.RequestHeld)
    assert held(engine, room) == 0
    refused(locks, room, ident, sl.RequestOver)


@pytest.mark.parametrize("name", ENGINES)
def test_id_is_granted_again_if_its_block_raised_that_it_was_lost(name: str, engine_to: MakeEngine) -> None:
    """The replies to its renewals were lost, and its release comes before its time has run out on the server."""
    engine = engine_to(name)
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    with pytest.raises(sl.LockLost, match="could not be renewed in time"), block(locks, room, ident) as lost:
        lost.lost.deadline = clock()
    assert held(engine, room) == 0
    with block(locks, room, ident) as grant:
        grant.check()


@pytest.mark.parametrize("name", ENGINES)
def test_one_of_concurrent_callers_enters(name: str, engine_to: MakeEngine) -> None:
    """Each caller has an engine of its own, as another process would; the capacity suffices for all of them."""
    engine = engine_to(name)
    locks, room = sl.Locks(engine), made(engine, 4)
    parties = [sl.Locks(engine_to(name)) for _ in range(4)]
    for turn in range(9):
        ident, ready = unused("request"), threading.Barrier(4, timeout=PATIENCE)
        decided = threading.Barrier(4, timeout=PATIENCE)
        if turn % 3:
            expire_in(engine, locks.acquire({room: 1}, external_id=ident, ttl=3600))
        if turn % 3 == 2:
            locks.sweep()

        def one(mine: sl.Locks, ident: str = ident, ready: Any = ready, decided: Any = decided) -> str:
            ready.wait()
            try:
                with block(mine, room, ident):
                    decided.wait()  # a holder stays until every caller has its result
                    return "worked"
            except sl.RequestHeld:
                decided.wait()
                return "held"
            except BaseException:
                decided.abort()
                raise

        assert sorted(all_of(*(lambda mine=mine: one(mine) for mine in parties))) == ["held"] * 3 + ["worked"]
        assert held(engine, room) == 0


@pytest.mark.parametrize("name", SERVERS)
def test_expired_id_waits_for_guarded_write(name: str, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server's own limit is: the dead holder may have been stopped in a guarded write."""
    monkeypatch.setattr(semaphore_wait, "ROW_TIMEOUT", 1.0)
    engine = engine_to(name)
    if name != "postgresql15":
        engine = engine_to(name, connect_args={"init_command": f"SET innodb_lock_wait_timeout={PATIENCE}"})
    locks, room, ident = sl.Locks(engine), made(engine, 1), unused("request")
    dead = locks.acquire({room: 1}, external_id=ident, ttl=3600)
    expire_in(engine, dead)
    share = "FOR SHARE" if name == "postgresql15" else "LOCK IN SHARE MODE"
    writes = f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id {share}"
    with engine.begin() as writing:
        assert writing.scalar(text(writes), {"id": ident})
        for timeout, within in ((1, "within 1 s"), (0, r"\(timeout=0\)")):
            with pytest.raises(sl.LockTimeout, match=within) as late, block(locks, room, ident, timeout=timeout):
                raise AssertionError("it may still be written")
            assert late.value.kind == "semaphore"
    with block(locks, room, ident) as grant:
        assert grant.fence[room] > dead.fence[room]


@pytest.mark.parametrize("known", [True, False], ids=["its id", "no id"])
@pytest.mark.parametrize("name", SERVERS)
def test_lost_reply_of_its_own_is_no_other_caller(name: str, known: bool, servers: Servers) -> None:
    with cut_off(servers, name) as (engine, proxy):
        room = made(engine, 1)
        proxy.lose_answer(GRANTS[name])
        ident = unused("request") if known else None
        with sl.Locks(engine).semaphore(room, ttl=3600, timeout=PATIENCE, external_id=ident) as grant:
            assert (proxy.losses, grant.replayed, held(engine, room)) == (1, False, 1)
        assert held(engine, room) == 0


@pytest.mark.parametrize("name", SERVERS)
def test_lost_reply_at_the_head_of_the_queue_is_no_other_caller(
    name: str, servers: Servers, engine_to: MakeEngine
) -> None:
    direct = sl.Locks(engine_to(name))
    with cut_off(servers, name, pool_size=3) as (engine, proxy):
        room, ident = made(engine, 1), unused("request")
        blocker = direct.acquire({room: 1}, ttl=3600)
        statements: list[str] = []
        event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
        lost_at: list[float] = []

        def wait() -> tuple[bool, float]:
            with block(sl.Locks(engine), room, ident) as grant:
                assert (proxy.losses, held(engine, room)) == (1, 1)
                return grant.replayed, grant.lost.deadline

        waiting = later(wait)
        until(lambda: len(statements) > 10)  # it polls, at the head of the queue
        proxy.lose_answer(GRANTS[name], lambda: lost_at.append(clock()))
        direct.release(blocker)
        replayed, deadline = waiting.result(PATIENCE)
        assert not replayed
        # its time counts from the attempt whose reply was lost
        assert deadline <= lost_at[0] + 3600
        assert held(engine, room) == 0


def test_time_of_a_late_attempt_counts_from_when_it_was_sent(
    servers: Servers, engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is granted while its caller waits in a queue, and recognized only when that attempts again."""
    direct = sl.Locks(engine_to("postgresql15"))
    wait_for, granted_at = SemaphoreWaiter._wait_for, list[float]()

    def after_late_attempt(waiter: SemaphoreWaiter, name: str) -> sl.Grant | None:
        direct.release(blocker)
        assert direct._run(waiter._request, waiter._nonce).acquired
        granted_at.append(clock())
        return wait_for(waiter, name)

    with cut_off(servers, "postgresql15") as (engine, proxy):
        room = made(engine, 1)
        blocker = direct.acquire({room: 1}, ttl=3600)
        monkeypatch.setattr(SemaphoreWaiter, "_wait_for", after_late_attempt)
        proxy.lose_answer(b"semaphore_acquire")
        with sl.Locks(engine).semaphore(room, ttl=3600, timeout=PATIENCE) as grant:
            assert (proxy.losses, grant.replayed, held(engine, room)) == (1, False, 1)
            assert grant.lost.deadline <= granted_at[0] + 3600 * 0.95
        assert held(engine, room) == 0


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "not executed"])
@pytest.mark.parametrize("name", SERVERS)
def test_id_of_a_block_that_raised_is_free_whatever_request_its_exit_lost(
    name: str, executed: bool, servers: Servers
) -> None:
    """The second attempt to free it must not spend it, if the first one did nothing."""
    with cut_off(servers, name) as (engine, proxy):
        locks, room, lost = sl.Locks(engine), made(engine, 1), list[bytes]()
        for number in itertools.count(1):
            ident = unused("request")
            with pytest.raises(OfTheApp):
                with block(locks, room, ident):
                    proxy.die_at(number, executed=executed)
                    raise OfTheApp
            fatal = proxy.fatal
            proxy.forget()
            assert held(engine, room) == 0
            with block(locks, room, ident) as grant:
                assert not grant.replayed
            if fatal is None:
                break
            lost.append(fatal)
    assert any(b"COMMIT" in each for each in lost)

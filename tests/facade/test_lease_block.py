"""``locks.semaphore`` and ``locks.lease``: what a block holds, emits and releases."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select

import sqlalchemy_locks as sl
from sqlalchemy_locks.core import transaction
from sqlalchemy_locks.runtime.renewal import clock
from tests.conftest import Servers
from tests.facade.test_lease_ids import GRANTS, cut_off
from tests.fixtures.engines import MakeEngine
from tests.fixtures.holders import DOCUMENT, write
from tests.fixtures.lease_faces import FACES, everywhere, grant_of, locks_of, lost
from tests.fixtures.parties import PATIENCE, connected, installed, later, until
from tests.fixtures.semaphores import ENGINES, expire, held, in_memory, made, unused


@pytest.fixture
def document() -> Any:
    """Makes the table of an engine, with one row in it."""

    def make(engine: Engine) -> None:
        DOCUMENT.create(engine, checkfirst=True)
        with engine.begin() as connection:
            connection.execute(DOCUMENT.delete())
            connection.execute(insert(DOCUMENT).values(id=1, body="", fence=0))

    return make


@everywhere
def test_block_holds_checks_and_releases(face: str, servers: Any, engine_to: MakeEngine) -> None:
    engine = engine_to(FACES[face][0])
    sem, other = made(engine, 2), made(engine, 5)
    with locks_of(face, servers) as locks:
        with locks.semaphore(sem, ttl=3600, timeout=PATIENCE) as grant:
            assert (grant.permits, grant.fence, grant.state) == ({sem: 1}, {sem: 1}, "ACQUIRED")
            assert grant.expires_at is not None
            assert not grant.lost.wait(timedelta(0))
            assert repr(grant_of(grant).lost) == "<not lost>"
            grant.check()
            with locks.semaphore({sem: 1, other: 3}, external_id=unused("job"), owner="me") as both:
                assert both.permits == {sem: 1, other: 3}
                assert (held(engine, sem), held(engine, other)) == (2, 3)
        assert (held(engine, sem), held(engine, other)) == (0, 0)
        assert grant.lost.wait()
        with pytest.raises(sl.LockLost, match="the block has ended"):
            grant.check()
        with pytest.raises(sl.LockLost), locks.semaphore(other, count=4, ttl=3600) as grant:
            with engine.begin() as connection:
                expire(connection, grant)
            assert not lost(grant)
            for _ in range(2):
                with pytest.raises(sl.LockLost, match="its time had run out"):
                    grant.check()
            assert grant.lost.wait(timedelta(seconds=PATIENCE))


@everywhere
def test_lease_is_made_on_first_use_and_held_by_one(face: str, servers: Any) -> None:
    with locks_of(face, servers) as locks, locks_of(face, servers) as elsewhere:
        lease = unused("lease")
        with locks.lease(lease) as grant:
            assert grant.fence == {lease: 1}
            with pytest.raises(sl.LockTimeout, match=r"had no room \(timeout=0\)"):
                elsewhere.lease(lease, timeout=0).__enter__()
        with elsewhere.lease(lease) as grant:
            assert grant.fence == {lease: 2}


@pytest.mark.parametrize("name", ENGINES)
def test_lease_in_itself_is_refused(name: str, engine_to: MakeEngine) -> None:
    locks, lease = sl.Locks(engine_to(name)), unused("lease")
    with locks.lease(lease):
        for again in (locks.lease(lease, timeout=0), locks.lease(lease)):
            with pytest.raises(sl.ReentryError, match="holds .* already"):
                again.__enter__()


@pytest.mark.parametrize("name", ENGINES)
def test_wait_that_would_deadlock_is_refused(name: str, engine_to: MakeEngine) -> None:
    engine = engine_to(name)
    sem = made(engine, 3)
    locks = sl.Locks(engine)
    with locks.semaphore(sem, count=2):
        with locks.semaphore(sem):
            with pytest.raises(sl.ReentryError, match="holds 3 of 3 permits"):
                locks.semaphore(sem).__enter__()
        with pytest.raises(sl.ReentryError, match="holds 2 of 3 permits"):
            locks.semaphore(sem, count=2).__enter__()
        # another thread may wait, since this one releases what it waits for
        waiting = later(in_a_block, locks, sem, 3)
        until(lambda: in_memory(engine, sem), unless=waiting)
        # queued behind that thread, this one would deadlock as well
        with pytest.raises(sl.ReentryError, match="holds 2 of 3 permits"):
            locks.semaphore(sem, count=2).__enter__()
    assert waiting.result(PATIENCE) > 0


def in_a_block(locks: sl.Locks, sem: str, count: int) -> int:
    with locks.semaphore(sem, count=count) as grant:
        return grant.fence[sem]


@pytest.mark.parametrize("name", ENGINES)
def test_lost_block_raises_and_writes_nothing(
    name: str, engine_to: MakeEngine, document: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_to(name)
    document(engine)
    lease = unused("lease")
    locks, others = sl.Locks(engine), sl.Locks(engine)
    with pytest.raises(sl.LockLost, match="are held no longer: it had been released or swept when its block ended"):
        with locks.lease(lease, ttl=3600) as grant:
            assert locks.run(sl.guarded(write("mine"), grant)) is True
            assert locks.run(sl.fenced(write("mine"), DOCUMENT.c.fence, grant.fence[lease])) is True
            with engine.begin() as connection:
                expire(connection, grant)
            next_one = others.acquire({lease: 1}, ttl=3600, timeout=0)
            assert locks.run(sl.fenced(write("the next one's"), DOCUMENT.c.fence, next_one.fence[lease])) is True
            # the first one isn't notified yet, and its release is refused
            with pytest.raises(sl.LockLost):
                locks.run(sl.guarded(write("too late"), grant))
            with pytest.raises(sl.StaleToken):
                locks.run(sl.fenced(write("too late"), DOCUMENT.c.fence, grant.fence[lease]))
    with engine.connect() as connection:
        assert connection.scalar(select(DOCUMENT.c.body)) == "the next one's"
    assert others.release(next_one) is sl.Released.RELEASED


def test_loss_does_not_mask_error(engine_to: MakeEngine) -> None:
    engine = engine_to("sqlite")
    lease = unused("lease")
    locks = sl.Locks(engine)
    with pytest.raises(KeyError) as found, locks.lease(lease) as grant:
        locks.release(grant)
        raise KeyError("the user's")
    if sys.version_info >= (3, 11):
        assert "are held no longer" in found.value.__notes__[0]
    with pytest.raises(KeyError) as found, locks.lease(lease):
        raise KeyError("the user's")
    assert not getattr(found.value, "__notes__", None)
    assert held(engine, lease) == 0


def test_failed_release_is_logged(
    engine_to: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "ROW_TIMEOUT", 0.2)
    engine = engine_to("postgresql15")
    lease = unused("lease")
    with caplog.at_level(logging.WARNING, "sqlalchemy_locks"), engine.connect() as keeper:
        with sl.Locks(engine).lease(lease, ttl=3600) as grant:
            keeper.exec_driver_sql(
                "SELECT FROM lock.permit_request WHERE external_id = %s FOR UPDATE", (grant.external_id,)
            )
            keeper.exec_driver_sql("SELECT 1")
        assert "could not be released, and ends with its time" in caplog.text
        keeper.rollback()
    assert held(engine, lease) == 1
    assert sl.Locks(engine).release(grant) is sl.Released.RELEASED


def test_bad_arguments_are_refused_without_statement(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    for wrong, error, why in (
        (lambda: locks.semaphore("a", ttl=None), TypeError, "a block needs a ttl"),
        (lambda: locks.semaphore("a", ttl=0.5), ValueError, "at least 1 second"),
        (lambda: locks.semaphore("a", ttl="5m"), TypeError, "ttl is a number"),
        (lambda: locks.semaphore("a", timeout=-1), ValueError, "timeout must be"),
        (lambda: locks.semaphore("a", count=0), ValueError, "a count of permits"),
        (lambda: locks.semaphore("a", count=True), TypeError, "a count of permits"),
        (lambda: locks.semaphore({"a": 1}, count=1), TypeError, "a mapping has its counts"),
        (lambda: locks.semaphore({}), ValueError, "at least one"),
        (lambda: locks.semaphore(7), TypeError, "how many of each"),
        (lambda: locks.semaphore("a", external_id=""), ValueError, "external_id"),
        (lambda: locks.semaphore("a", owner="x "), ValueError, "an owner"),
        (lambda: locks.lease(""), ValueError, "a lease's name"),
        (lambda: locks.lease({"a": 1}), TypeError, "a lease's name"),
    ):
        with pytest.raises(error, match=why):
            wrong()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ENGINES)
def test_lease_counts_permits_from_before_resize(name: str, engine_to: MakeEngine) -> None:
    engine, lease = engine_to(name), unused("lease")
    locks = sl.Locks(engine)
    with locks.lease(lease):
        pass
    with locks.lease(lease):
        locks.run(sl.semaphore.resize(lease, 2))
        with pytest.raises(sl.Unsupported, match="is a semaphore of 2"):
            later(locks.lease(lease).__enter__).result(PATIENCE)
        assert held(engine, lease) == 1


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_lease_counts_permits_although_its_grant_is_repeated(name: str, servers: Servers) -> None:
    """The answer to the first attempt is lost, and the semaphore is resized before the second."""
    with cut_off(servers, name) as (engine, proxy):
        lease = unused("lease")
        with connected(installed(servers, name)) as direct:
            with sl.Locks(direct).lease(lease):
                pass

            def resize(*_: Any) -> None:
                sl.Locks(direct).run(sl.semaphore.resize(lease, 2))

            locks = sl.Locks(engine)
            event.listen(locks, "retried", resize)
            proxy.lose_answer(GRANTS[name])
            with pytest.raises(sl.Unsupported, match="is a semaphore of 2"):
                locks.lease(lease, timeout=PATIENCE).__enter__()
            assert proxy.losses == 1
            assert held(direct, lease) == 0


def test_copy_of_lease_is_the_grant(engine_to: MakeEngine) -> None:
    locks = sl.Locks(engine_to("sqlite"))
    with locks.lease(unused("lease")) as grant:
        for twin in (pickle.loads(pickle.dumps(grant)), copy.deepcopy(grant), copy.copy(grant)):
            assert type(twin) is sl.Grant
            assert vars(twin).items() <= vars(grant).items()


def test_time_to_live_counts_from_before_the_request(engine_to: MakeEngine) -> None:
    engine, sent = engine_to("sqlite"), list[float]()
    sem = made(engine, 1)
    event.listen(engine, "before_cursor_execute", lambda *_: sent.append(clock()))
    with sl.Locks(engine).semaphore(sem, ttl=3600) as grant:
        assert grant.lost.deadline <= sent[0] + 3600 * 0.95


@pytest.mark.parametrize("name", ENGINES)
def test_late_reply_is_renewed_before_entering(name: str, engine_to: MakeEngine) -> None:
    """The reply to the acquire arrives after the lease has expired by the server's clock."""
    engine, sem = engine_to(name), made(engine_to(name), 1)
    locks = sl.Locks(engine)
    for over in (False, True):
        block = locks.semaphore(sem, ttl=3600)
        acquire = block._acquire

        def slowly(own: Any, acquire: Any = acquire, over: bool = over) -> Any:
            grant, asked_at = acquire(own)
            if over:
                with engine.begin() as connection:
                    expire(connection, grant)
            return grant, asked_at - 3600

        block._acquire = slowly  # type: ignore[method-assign]
        if over:
            with pytest.raises(sl.LockLost, match="its time ran out meanwhile"):
                block.__enter__()
            assert held(engine, sem) == 0
        else:
            with block as grant:
                assert not grant.lost

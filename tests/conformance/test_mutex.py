"""Mutex and timeout: the same results on all engines, drivers and runners."""

from __future__ import annotations

from datetime import datetime

import pytest

import sqlalchemy_locks as sl
from tests.conformance.conftest import World
from tests.fixtures.parties import PATIENCE, in_one_day, snapshot_isolation

mutex = sl.Mutex()
NOW = 1_700_000_000


def test_one_has_it_until_it_is_released(world: World) -> None:
    a, b, id = world.client(), world.client(), world.key()
    assert a.scalar(mutex.create(id)) == 1
    a.end()
    assert b.scalar(mutex.create(id)) == 0
    b.end()
    assert a.scalar(mutex.acquire(id)) is True
    a.end()
    assert b.scalar(mutex.acquire(id)) is False
    assert b.scalar(mutex.acquire(id, nowait=True)) is False
    b.end()
    assert a.scalar(mutex.acquire(id)) is False  # not even by its holder
    assert a.scalar(mutex.release(id)) is True
    assert a.scalar(mutex.release(id)) is False
    a.end()
    assert b.scalar(mutex.acquire(id)) is True
    b.end()


def test_a_rollback_undoes_an_acquisition(world: World) -> None:
    a, b, id = world.client(), world.client(), world.key()
    if a.transient:
        pytest.skip("Locks.run commits by itself")
    a.scalar(mutex.create(id))
    a.end()
    assert a.scalar(mutex.acquire(id)) is True
    a.end(rollback=True)
    assert b.scalar(mutex.acquire_token(id)) == 1
    b.end()


def test_an_uncommitted_holder_is_waited_for(world: World) -> None:
    a, b, c, id = world.client(), world.client(), world.client(), world.key()
    if a.transient:
        pytest.skip("Locks.run commits by itself")
    a.scalar(mutex.create(id))
    a.end()
    assert a.scalar(mutex.acquire(id)) is True
    assert b.scalar(mutex.acquire(id, nowait=True)) is False
    b.end()
    with pytest.raises(sl.LockTimeout):
        b.scalar(mutex.acquire(id).execution_options(locks_wait=0.05))
    b.end(rollback=True)
    if world.is_sqlite:
        a.end()
    else:
        waiting = b.later(b.scalar, mutex.acquire(id))
        world.waits(waiting)
        assert c.scalar(mutex.acquire(id, nowait=True)) is False
        c.end()
        a.end(rollback=True)
        assert waiting.result(PATIENCE) is True
        b.end()
    assert c.scalar(mutex.acquire(id).execution_options(locks_wait=60)) is False
    c.end()


def test_a_row_hidden_by_an_old_snapshot_is_not_unknown(world: World) -> None:
    if world.is_sqlite:
        pytest.skip("SQLite's writers have no old snapshot: they roll back")
    a, b, known, id = world.client(), world.client(), world.key(), world.key()
    a.scalar(mutex.create(known))
    a.end()
    assert b.scalar(mutex.acquire(known)) is True  # begins; at REPEATABLE READ the probe creates its snapshot
    assert b.scalar(mutex.acquire(known)) is False
    assert a.scalar(mutex.create(id)) == 1
    assert a.scalar(mutex.acquire(id)) is True
    a.end()
    if snapshot_isolation(world.plain) and not b.transient:
        with pytest.raises(sl.MustRollback, match="lock before the first read"):
            b.scalar(mutex.acquire(id))
        b.end(rollback=True)
    assert b.scalar(mutex.acquire(id)) is False
    b.end()


def test_by_its_owner_only_where_one_is_asked_for(world: World) -> None:
    a, id = world.client(), world.key()
    a.scalar(mutex.create(id))
    assert a.scalar(mutex.acquire(id, owner="ann")) is True
    assert a.scalar(mutex.release(id, owner="bob")) is False
    assert a.scalar(mutex.acquire(id)) is False
    assert a.scalar(mutex.release(id, owner="ann")) is True
    assert a.scalar(mutex.acquire(id)) is True
    assert a.scalar(mutex.release(id, owner="ann")) is False
    a.end()


def test_tokens_rise_and_retries_run_out(world: World) -> None:
    a, id = world.client(), world.key()
    a.scalar(mutex.create(id, retries=2))
    assert [take(a, id), take(a, id), take(a, id)] == [1, 2, None]
    assert a.scalar(mutex.acquire(id)) is False
    assert a.scalar(mutex.set_retries(id, 1)) is True
    assert [take(a, id), take(a, id)] == [3, None]
    assert a.scalar(mutex.set_retries(id, None)) is True
    assert [take(a, id), take(a, id)] == [4, 5]
    timeout, clock = sl.Timeout(every=60, clock=lambda: clock[0]), [NOW]
    a.scalar(timeout.create(id, retries=1))
    assert [a.scalar(timeout.acquire_token(id)), a.scalar(timeout.acquire_token(id))] == [1, None]
    clock[0] += 61
    assert a.scalar(timeout.acquire(id)) is False
    assert a.scalar(timeout.set_retries(id, 1)) is True
    assert a.scalar(timeout.acquire_token(id)) == 2
    a.end()


def take(client, id: str) -> int | None:
    token = client.scalar(mutex.acquire_token(id))
    if token is not None:
        assert client.scalar(mutex.release(id)) is True
    return token


def test_queues_hold_the_same_id_independently(world: World) -> None:
    a, id, queue = world.client(), world.key(), world.key("queue")
    for where in (None, queue):
        assert a.scalar(mutex.create(id, queue=where)) == 1
    assert a.scalar(mutex.acquire(id)) is True
    assert a.scalar(mutex.acquire(id, queue=queue)) is True
    assert a.scalar(mutex.release(id)) is True
    assert a.scalar(mutex.acquire(id, queue=queue)) is False
    assert a.scalar(mutex.acquire(id, queue="default")) is True
    a.end()


def test_an_unknown_mutex_has_no_holder(world: World) -> None:
    a, id = world.client(), world.key()
    timeout = sl.Timeout(every=60)
    for operation in (
        mutex.acquire(id),
        mutex.acquire(id, nowait=True),
        mutex.acquire_token(id),
        mutex.release(id),
        mutex.set_retries(id, 1),
        timeout.acquire(id),
    ):
        with pytest.raises(sl.UnknownTask, match=r"there is no .* in the queue 'default'"):
            a.scalar(operation)
        a.end(rollback=True)


def test_a_timeout_is_free_again_when_its_period_is_over(world: World) -> None:
    a, b, id, clock = world.client(), world.client(), world.key(), [NOW]
    every = sl.Timeout(every=60, clock=lambda: clock[0])
    own = sl.Timeout(clock=lambda: clock[0])
    assert a.scalar(every.create(id)) == 1
    a.end()
    assert a.scalar(every.acquire(id)) is True
    a.end()
    for later, expected in ((0, False), (60, False), (61, True), (61, False), (122, True)):
        clock[0] = NOW + later
        for timeout in (every, own) if not expected else (own,):
            assert b.scalar(timeout.acquire(id)) is expected, later
        b.end()
    clock[0] -= 1000
    assert b.scalar(every.acquire_token(id)) is None  # a clock that was set back doesn't make it free
    b.end()


def test_the_first_acquire_of_each_window_succeeds(world: World) -> None:
    a, b, id, clock = world.client(), world.client(), world.key(), [NOW - NOW % 3600]
    hourly = sl.Timeout(every=3600, windowed=True, clock=lambda: clock[0])
    a.scalar(hourly.create(id))
    a.end()
    for later, expected in ((0, True), (1, False), (3599, False), (3600, True), (7199, False), (3 * 3600 + 1, True)):
        clock[0] = NOW - NOW % 3600 + later
        assert a.scalar(hourly.acquire(id)) is expected, later
        a.end()
        assert b.scalar(hourly.acquire(id, nowait=True)) is False
        b.end()


def test_days_of_a_zone_change_at_its_midnight(world: World) -> None:
    a, id, clock = world.client(), world.key(), [0.0]
    nightly = sl.Timeout(every=86400, windowed=True, tz="Europe/Paris", clock=lambda: clock[0])
    a.scalar(nightly.create(id))
    # 2026-03-29 has 23 hours there, 2026-10-25 has 25; midnight in Paris is at 23:00 UTC in winter, 22:00 in summer
    for instant, expected in (
        ("2026-03-28T22:59:59", True),
        ("2026-03-28T23:00:00", True),
        ("2026-03-29T21:59:59", False),
        ("2026-03-29T22:00:00", True),
        ("2026-10-24T21:59:59", True),
        ("2026-10-24T22:00:00", True),
        ("2026-10-25T22:59:59", False),
        ("2026-10-25T23:00:00", True),
    ):
        clock[0] = datetime.fromisoformat(f"{instant}+00:00").timestamp()
        assert a.scalar(nightly.acquire(id)) is expected, instant
    a.end()


def test_by_the_server_s_clock(world: World) -> None:
    a = world.client()

    def once_a_day() -> None:
        id = world.key()
        for timeout in (sl.Timeout(every=86400), sl.Timeout(every=86400, windowed=True)):
            a.scalar(timeout.create(id))
        assert a.scalar(sl.Timeout(every=86400).acquire(id)) is True
        assert a.scalar(sl.Timeout(every=86400).acquire(id)) is False
        assert a.scalar(sl.Timeout(every=86400, windowed=True).acquire(id)) is False
        assert a.scalar(sl.Timeout(every=86400, windowed=True, tz="Asia/Kolkata").acquire(id)) is False

    in_one_day(once_a_day, "Asia/Kolkata")
    a.end()

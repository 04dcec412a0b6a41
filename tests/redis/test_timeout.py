"""Timeout on Redis: once per period, in both forms, by a clock that the test sets."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
import redis

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import Timeout
from tests.redis.conftest import Party


class Clock:
    """A clock that the test sets."""

    def __init__(self, now: float = 1_700_000_000) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_elapsed(party: Party, queue: str) -> None:
    clock = Clock()
    daily = Timeout(party.client, every=86400, clock=clock)
    assert party(daily.create("a", "b", queue=queue)) == 2
    assert party(daily.create("a", queue=queue)) == 0
    assert party(daily.acquire("a", queue=queue)) is True
    assert party(daily.acquire("a", queue=queue)) is False
    assert party(daily.acquire("b", queue=queue)) is True
    clock.now += 86400
    assert party(daily.acquire("a", queue=queue)) is False, "ts + timeout < now"
    clock.now += 1
    assert party(daily.acquire_token("a", queue=queue)) > 0
    assert party(daily.acquire_token("a", queue=queue)) is None
    clock.now -= 86400 * 2
    assert party(daily.acquire("a", queue=queue)) is False, "a clock that goes back gives nothing"


def test_windowed(party: Party, queue: str) -> None:
    clock = Clock(1445412480)
    hourly = Timeout(party.client, every=3600, windowed=True, clock=clock)
    party(hourly.create("a", queue=queue))
    assert party(hourly.acquire("a", queue=queue)) is True
    assert party(hourly.acquire("a", queue=queue)) is False
    clock.now = 401504 * 3600 - 1
    assert party(hourly.acquire("a", queue=queue)) is False
    clock.now += 1
    assert party(hourly.acquire("a", queue=queue)) is True
    clock.now -= 1
    assert party(hourly.acquire("a", queue=queue)) is False, "first write wins, and no write goes back"


def test_period_per_id(party: Party, queue: str) -> None:
    clock = Clock()
    own = Timeout(party.client, clock=clock)
    party(own.create("minute", queue=queue, every=60))
    party(own.create("hour", queue=queue, every=timedelta(hours=1)))
    assert [party(own.acquire(id, queue=queue)) for id in ("hour", "minute")] == [True, True]
    clock.now += 61
    assert [party(own.acquire(id, queue=queue)) for id in ("hour", "minute")] == [False, True]
    clock.now += 3600
    assert party(own.acquire("hour", queue=queue)) is True
    shorter = Timeout(party.client, every=1, clock=clock)
    clock.now += 2
    assert party(shorter.acquire("hour", queue=queue)) is True, "every= comes before it"
    with pytest.raises(ValueError, match="every="):
        party(own.create("none", queue=queue))
    windows = Timeout(party.client, windowed=True, clock=clock)
    clock.now = (clock.now // 3600 + 1) * 3600
    assert party(windows.acquire("hour", queue=queue)) is True
    assert party(windows.acquire("hour", queue=queue)) is False


def test_windows_of_local_days(party: Party, queue: str) -> None:
    clock = Clock()
    nightly = Timeout(party.client, every=86400, windowed=True, tz="Europe/Paris", clock=clock)
    party(nightly.create("a", queue=queue))
    runs = []
    # every half hour of the days around both changes of 2023
    for first in (datetime(2023, 3, 24, tzinfo=timezone.utc), datetime(2023, 10, 27, tzinfo=timezone.utc)):
        for half_hour in range(48 * 5):
            at = first + timedelta(minutes=30 * half_hour)
            clock.now = at.timestamp()
            if party(nightly.acquire("a", queue=queue)):
                runs.append(at)
    assert [f"{at:%m-%d %H:%M}" for at in runs] == [
        *("03-24 00:00", "03-24 23:00", "03-25 23:00", "03-26 22:00", "03-27 22:00", "03-28 22:00"),
        *("10-27 00:00", "10-27 22:00", "10-28 22:00", "10-29 23:00", "10-30 23:00", "10-31 23:00"),
    ]


def test_clock_of_the_server_decides(party: Party, queue: str, plain: redis.Redis) -> None:
    timeout, window = Timeout(party.client, every=3600), Timeout(party.client, every=3600, windowed=True)
    party(timeout.create("a", "b", queue=queue))
    assert party(timeout.acquire("a", queue=queue)) is True
    assert party(timeout.acquire("a", queue=queue)) is False
    before = plain.time()[0]
    assert party(window.acquire("b", queue=queue)) is True
    began = plain.zscore(f"{{sqlalchemy_locks:{queue}}}:timeout", "b")
    assert began is not None
    assert began % 3600 == 0
    assert before - 3600 < began <= plain.time()[0]


def test_unknown_ids_and_retries(party: Party, queue: str) -> None:
    clock = Clock()
    timeout = Timeout(party.client, every=1, clock=clock)
    for call in (timeout.acquire, timeout.acquire_token):
        with pytest.raises(sl.UnknownTask):
            party(call("a", queue=queue))
    party(timeout.create("a", queue=queue, retries=2))
    for answer in (True, True, False):
        clock.now += 2
        assert party(timeout.acquire("a", queue=queue)) is answer
    party(timeout.set_retries("a", 1, queue=queue))
    assert party(timeout.acquire("a", queue=queue)) is True

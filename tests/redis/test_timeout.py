"""Timeout on Redis: once per period, in both forms, by a clock that the test sets."""

from __future__ import annotations

from datetime import datetime, timedelta

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
    # 2023-03-26 has 23 hours there, 2023-10-29 has 25; midnight in Paris is at 23:00 UTC in winter, 22:00 in summer
    for instant, expected in (
        ("2023-03-25T22:59:59", True),
        ("2023-03-25T23:00:00", True),
        ("2023-03-26T21:59:59", False),
        ("2023-03-26T22:00:00", True),
        ("2023-10-28T21:59:59", True),
        ("2023-10-28T22:00:00", True),
        ("2023-10-29T22:59:59", False),
        ("2023-10-29T23:00:00", True),
    ):
        clock.now = datetime.fromisoformat(f"{instant}+00:00").timestamp()
        assert party(nightly.acquire("a", queue=queue)) is expected, instant


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

"""The server's clock, read after the row is locked, whatever the wait, the session's zone and the app's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timezone
from functools import partial

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks._utc_offsets import offsets_around, zone
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import Epoch
from sqlalchemy_locks.sql.tables import tables
from tests.fixtures.parties import ENGINES, INNODB, PATIENCE, SERVERS, Watch, in_one_day, later, until, unused

ZONES = {
    "postgresql15": ["SET TIME ZONE 'Asia/Kathmandu'", "SET TIME ZONE 'America/St_Johns'"],
    "mysql": ["SET time_zone = '+05:45'", "SET time_zone = '-03:30'"],
    "mariadb": ["SET time_zone = '+05:45'", "SET time_zone = '-03:30'"],
}


def stamp(session: Session, id: str) -> int:
    table = build_context(session.get_bind().dialect, {}).tables.task_timeout
    return int(session.scalars(select(table.c.ts).where(table.c.id == id)).one())


def now(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(select(Epoch())).scalar_one())


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_timestamp_is_read_after_the_wait(
    id: str, engine: Engine, watch: Callable[[str], Watch], name: str, isolation: str
) -> None:
    """A holder rolls back after a while: the waiter's timestamp is later than the rollback."""
    timeout = sl.Timeout(every=1)
    sl.Locks(engine).run(timeout.create(id))
    other = engine.execution_options(isolation_level=isolation)
    with Session(engine) as first, Session(other) as second:
        assert first.scalar(timeout.acquire(id)) is True
        watcher = watch(name)
        waiting = later(second.scalar, timeout.acquire(id))
        watcher.until_waiting(waiting)
        began = now(engine)
        until(lambda: now(engine) > began, pause=0.1)
        rolled_back = now(engine)
        first.rollback()
        assert waiting.result(PATIENCE) is True
        assert stamp(second, id) >= rolled_back
        second.commit()


@pytest.mark.parametrize("name", INNODB)
@pytest.mark.parametrize("waited", [1800, 7200, 86400 * 300])
def test_timestamp_ignores_the_statement_start(id: str, engine: Engine, name: str, waited: int) -> None:
    """``SET timestamp`` simulates a long wait: it sets the instant at which statements begin."""
    timeout, mutex = sl.Timeout(every=60), sl.Mutex()
    sl.Locks(engine).run(timeout.create(id))
    sl.Locks(engine).run(mutex.create(id))
    with Session(engine) as session:
        before = now(engine)
        session.execute(text("SET timestamp = :began"), {"began": before - waited})
        assert session.scalar(timeout.acquire(id)) is True
        assert session.scalar(mutex.acquire(id)) is True
        assert before <= stamp(session, id) <= now(engine)
        assert session.scalar(timeout.acquire(id)) is False
        table = tables(None, "lock_").task_state
        acquired_at = session.scalars(select(table.c.acquired_at).where(table.c.id == id)).one()
        session.rollback()
    assert before <= acquired_at.replace(tzinfo=timezone.utc).timestamp() < now(engine) + 1


@pytest.mark.parametrize("name", SERVERS)
def test_session_time_zone_is_ignored(engine: Engine, name: str) -> None:
    def once_a_day(timeout: sl.Timeout, setting: str) -> None:
        id = unused()
        with Session(engine) as session:
            session.execute(text(setting))
            session.scalar(timeout.create(id))
            before = now(engine)
            assert session.scalar(timeout.acquire(id)) is True
            assert before <= stamp(session, id) <= now(engine)
            assert session.scalar(timeout.acquire(id)) is False
            session.commit()
        with Session(engine) as session:
            assert session.scalar(timeout.acquire(id)) is False

    for setting in ZONES[name]:
        for windowed, tz in ((False, None), (True, None), (True, "Europe/Paris")):
            timeout = sl.Timeout(every=86400, windowed=windowed, tz=tz)
            in_one_day(partial(once_a_day, timeout, setting), "Europe/Paris")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("off", [-3600, 3600])
def test_clock_of_the_app_is_ignored(engine: Engine, name: str, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off)

    def once_a_day(timeout: sl.Timeout) -> None:
        id = unused()
        with Session(engine) as session:
            session.scalar(timeout.create(id))
            before = now(engine)
            assert session.scalar(timeout.acquire(id)) is True
            assert before <= stamp(session, id) <= now(engine)
            assert session.scalar(timeout.acquire(id)) is False

    for windowed, tz in ((False, None), (True, None), (True, "Europe/Paris")):
        timeout = sl.Timeout(every=86400, windowed=windowed, tz=tz)
        in_one_day(partial(once_a_day, timeout), "Europe/Paris")


@pytest.mark.parametrize("place", ["Europe/Paris", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"])
def test_offsets_match_zoneinfo_for_two_years(place: str) -> None:
    """The offsets that statements use equal those of ``zoneinfo`` before, at and after a change."""
    from datetime import datetime

    there = zone(place)

    def expected(at: int) -> float:
        return datetime.fromtimestamp(at, there).utcoffset().total_seconds()  # type: ignore[union-attr]

    for hour in range(1_700_000_000 // 3600, 1_763_000_000 // 3600):
        instant = hour * 3600
        if hour % 25 and expected(instant - 86400) == expected(instant + 86400):
            continue  # far from a change, as most hours are
        offsets = offsets_around(there, instant)
        for at in (instant - 3600, instant, instant + 3600):
            offset = offsets.before if at < offsets.first else offsets.between if at < offsets.second else offsets.after
            assert offset == expected(at)

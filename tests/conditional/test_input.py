"""Invalid input raises before any SQL is sent."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.dialects import mssql, mysql, postgresql, sqlite
from sqlalchemy.exc import CompileError

import sqlalchemy_locks as sl

mutex, timeout = sl.Mutex(), sl.Timeout(every=60)

BAD_NAMES: list[tuple[Any, type[Exception]]] = [
    ("", ValueError),
    ("a ", ValueError),
    ("a" * 256, ValueError),
    ("a\0b", ValueError),
    ("\ud800", ValueError),
    (None, TypeError),
    (True, TypeError),
    (b"a", TypeError),
    (1, TypeError),
]


@pytest.mark.parametrize(("name", "error"), BAD_NAMES, ids=ascii)
def test_invalid_names_are_refused(name: Any, error: type[Exception]) -> None:
    for pattern in (mutex, timeout):
        for call in (pattern.create, pattern.acquire, pattern.acquire_token):
            with pytest.raises(error):
                call(name)
        with pytest.raises(error):
            pattern.set_retries(name, 1)
        if name is not None:
            for call in (pattern.create, pattern.acquire):
                with pytest.raises(error):
                    call("a", queue=name)
            with pytest.raises(error):
                mutex.capture(1, queue=name)
    with pytest.raises(error):
        mutex.release(name)
    if name is not None:
        for call in (mutex.acquire, mutex.release, mutex.acquire_token):
            with pytest.raises(error):
                call("a", owner=name)
        with pytest.raises(error):
            sl.Locks(create_engine("sqlite:///unused.db"), owner=name)


@pytest.mark.parametrize("pattern", [mutex, timeout], ids=["mutex", "timeout"])
def test_invalid_numbers_are_refused(pattern: Any) -> None:
    for limit, error in ((0, ValueError), (-1, ValueError), (2**31, ValueError), (True, TypeError), ("3", TypeError)):
        with pytest.raises(error):
            mutex.capture(limit)
    for retries, error in (
        (-1, ValueError),
        (2**31, ValueError),
        (True, TypeError),
        ("3", TypeError),
        (1.5, TypeError),
    ):
        with pytest.raises(error):
            pattern.create("a", retries=retries)
        with pytest.raises(error):
            pattern.set_retries("a", retries)
    with pytest.raises(ValueError, match="at least one id"):
        pattern.create()


def test_periods_zones_and_clocks() -> None:
    for every in (0, -1, 0.5, float("nan"), timedelta(milliseconds=1500)):
        with pytest.raises(ValueError, match="every"):
            sl.Timeout(every=every)
    for every in ("5m", True, None.__class__):
        with pytest.raises(TypeError, match="every"):
            sl.Timeout(every=every)
    with pytest.raises(ValueError, match="pass every="):
        sl.Timeout().create("a")
    with pytest.raises(ValueError, match="windowed=True"):
        sl.Timeout(every=86400, tz="Europe/Paris")
    with pytest.raises(ValueError, match="no zone 'Europe/Pariss'"):
        sl.Timeout(every=86400, windowed=True, tz="Europe/Pariss")
    with pytest.raises(TypeError, match="name of a zone"):
        sl.Timeout(every=86400, windowed=True, tz=3600)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="clock is a function"):
        sl.Timeout(every=60, clock=5)  # type: ignore[arg-type]
    assert sl.Timeout(every=timedelta(hours=1)).create("a") is not None


def test_values_returned_by_clock(tmp_path: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/clock.db")
    sl.metadata().create_all(engine)
    locks = sl.Locks(engine)
    locks.run(timeout.create("a"))
    with pytest.raises(ValueError, match="without a zone"):
        locks.run(sl.Timeout(every=60, clock=lambda: datetime(2026, 1, 1)).acquire("a"))
    with pytest.raises(TypeError, match="seconds since 1970"):
        locks.run(sl.Timeout(every=60, clock=lambda: "now").acquire("a"))  # type: ignore[arg-type,return-value]
    engine.dispose()


def test_a_period_is_at_most_50_years() -> None:
    """It counts from 1970 where a timeout was never acquired."""
    sl.Timeout(every=timedelta(days=18_000))
    with pytest.raises(ValueError, match="50 years"):
        sl.Timeout(every=timedelta(days=20_000))


@pytest.mark.parametrize("operation", [mutex.acquire("a"), mutex.release("a"), timeout.acquire("a")], ids=repr)
def test_acquire_and_release_are_one_statement(operation: sl.Operation[Any]) -> None:
    for dialect in (postgresql.dialect(), mysql.dialect(), sqlite.dialect()):
        assert "UPDATE" in str(operation.compile(dialect=dialect))
    with pytest.raises(sl.Unsupported, match="mssql"):
        operation.compile(dialect=mssql.dialect())


def test_compile_explains_several_statements() -> None:
    for operation in (mutex.capture(3), mutex.acquire("a", nowait=True), mutex.create("a")):
        with pytest.raises(CompileError, match="is not one statement on MySQL, wh"):
            operation.compile(dialect=mysql.dialect())
    with pytest.raises(CompileError, match="busy timeout"):
        mutex.acquire("a", nowait=True).compile(dialect=sqlite.dialect())
    assert "SKIP LOCKED" in str(mutex.capture(3).compile(dialect=postgresql.dialect()))
    assert "LIMIT" not in str(mutex.capture(3).compile(dialect=postgresql.dialect())).rpartition("UPDATE ")[2]


def test_repr_shows_the_values() -> None:
    assert repr(mutex.acquire("a", owner="ann")) == "<mutex.acquire(id='a', queue='default', owner='ann')>"
    assert repr(timeout.acquire("a")) == "<timeout.acquire(id='a', queue='default', every=60)>"

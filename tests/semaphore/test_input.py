"""Bad input is refused before any SQL; an unsupported combination is refused with a sentence."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, update

import sqlalchemy_locks as sl

TABLE = Table("document", MetaData(), Column("id", Integer, primary_key=True), Column("body", Integer))
NAMES = [("", ValueError), ("a ", ValueError), ("x" * 256, ValueError), ("a\0b", ValueError), ("\ud800", ValueError)]
WRONG = [*NAMES, (7, TypeError), (b"a", TypeError)]


@pytest.mark.parametrize(("name", "error"), WRONG)
def test_invalid_names(name: Any, error: type[Exception]) -> None:
    for make in (
        lambda: sl.semaphore.create(name, 1),
        lambda: sl.semaphore.resize(name, 1),
        lambda: sl.semaphore.delete(name),
        lambda: sl.semaphore.holders(name),
        lambda: sl.semaphore.acquire({name: 1}),
        lambda: sl.semaphore.release(name),
        lambda: sl.semaphore.renew(name),
        lambda: sl.semaphore.acquire({"a": 1}, external_id=name),
        lambda: sl.semaphore.acquire({"a": 1}, owner=name),
        lambda: sl.semaphore.create("a", 1, by=name),
        lambda: sl.semaphore.history(name),
        lambda: sl.guarded(update(TABLE), name),
    ):
        with pytest.raises(error):
            make()


@pytest.mark.parametrize(
    ("number", "error"), [(-1, ValueError), (2**31, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)]
)
def test_invalid_counts(number: Any, error: type[Exception]) -> None:
    for make in (
        lambda: sl.semaphore.create("a", number),
        lambda: sl.semaphore.resize("a", number),
        lambda: sl.semaphore.acquire({"a": number}),
    ):
        with pytest.raises(error):
            make()
    with pytest.raises(ValueError, match="from 1 to"):
        sl.semaphore.acquire({"a": 0})


@pytest.mark.parametrize(
    ("length", "error"),
    [("5m", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError), (timedelta(-1), ValueError)],
)
def test_invalid_durations(length: Any, error: type[Exception]) -> None:
    locks = sl.Locks(create_engine("sqlite:///unused.db"))
    for make in (
        lambda: sl.semaphore.acquire({"a": 1}, ttl=length),
        lambda: sl.semaphore.sweep(stale_after=length),
        lambda: sl.semaphore.clean(older_than=length),
        lambda: sl.semaphore.clean_history(older_than=length),
        lambda: sl.semaphore.clean_leases(older_than=length),
        lambda: locks.acquire({"a": 1}, timeout=length),
        lambda: locks.sweep(stale_after=length),
    ):
        with pytest.raises(error):
            make()


@pytest.mark.parametrize("ttl", [0, float("inf"), 1e10, 0.0001])
def test_invalid_ttl(ttl: float) -> None:
    with pytest.raises(ValueError, match="ttl"):
        sl.semaphore.acquire({"a": 1}, ttl=ttl)


@pytest.mark.parametrize("permits", ["a", ["a"], None, {("a", 1)}])
def test_permits_are_a_mapping(permits: Any) -> None:
    with pytest.raises(TypeError, match="how many of each semaphore"):
        sl.semaphore.acquire(permits)
    with pytest.raises(ValueError, match="at least one semaphore"):
        sl.semaphore.acquire({})


def test_guarded_takes_an_update() -> None:
    with pytest.raises(TypeError, match="takes an UPDATE"):
        sl.guarded(insert(TABLE), "a")  # type: ignore[arg-type]
    with pytest.raises(sl.Unsupported, match="leave RETURNING out"):
        sl.guarded(update(TABLE).returning(TABLE.c.id), "a")  # type: ignore[arg-type]
    denied = sl.Grant("a", False, "DENIED", {"x": 1})
    with pytest.raises(sl.LockLost, match="was not granted"):
        sl.guarded(update(TABLE), denied)


def test_compile_names_reason() -> None:
    from sqlalchemy.dialects import mysql, postgresql, sqlite
    from sqlalchemy.exc import CompileError

    for operation in (sl.semaphore.acquire({"a": 1}), sl.semaphore.release("a"), sl.semaphore.create("a", 1)):
        assert "FROM lock.semaphore_" in str(operation.compile(dialect=postgresql.dialect())) or "SELECT lock." in str(
            operation.compile(dialect=postgresql.dialect())
        )
        for dialect in (mysql.dialect(), sqlite.dialect()):
            with pytest.raises(CompileError, match="not one statement on (MySQL|SQLite), where its rows are locked"):
                operation.compile(dialect=dialect)
    for read in (sl.semaphore.usage(), sl.semaphore.holders("a"), sl.semaphore.history(), sl.semaphore.history("a")):
        assert str(read.compile(dialect=mysql.dialect())).startswith("SELECT ")

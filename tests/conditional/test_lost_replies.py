"""Connections that die between the execution and its reply: the right result, or ``OutcomeUnknown``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import CHAR, Boolean, Column, Engine, MetaData, String, Table, Uuid, select, update
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from tests.faults.drivers import clear, through_a_proxy
from tests.fixtures.parties import EVERYWHERE, PATIENCE, Watch, later, until, unused

mutex = sl.Mutex()
#: one driver of each protocol: ``faults/test_death_at_statement.py`` has the others, and the operations one by one
protocols = pytest.mark.parametrize(("name", "driver"), [("postgresql15", "psycopg2"), ("mysql", "pymysql")])


@pytest.fixture
def other(engine: Engine) -> Engine:
    """Another process, connected to the server without a proxy."""
    return engine


def final(name: str) -> bytes:
    """Return the request whose execution completes the operation."""
    return b"\x03COMMIT" if name in ("mysql", "mariadb") else b"UPDATE"


def in_the_clear(servers: Any, name: str, driver: str) -> Any:
    """Connect through a proxy that can read the requests."""
    return through_a_proxy(servers, name, driver, **clear(driver))


def row(engine: Engine, id: str) -> Any:
    with engine.connect() as connection:
        table = build_context(engine.dialect, {}).tables.task_state
        return connection.execute(select(table).where(table.c.id == id)).one()


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb", "mysql", "mariadb", "sqlite"])
def test_late_first_try_does_not_acquire_again(servers: Any, other: Engine, name: str) -> None:
    """The server may execute a first try, whose connection died, after the second one and its release."""
    once = {"locks_nonce": "the call's"}
    hourly, [id, other_id] = sl.Timeout(every=3600), [unused(), unused()]
    shipped = build_context(other.dialect, {}).tables
    with other.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(mutex.create(id))
        connection.execute(hourly.create(other_id))
        for operation in (mutex.acquire(id), hourly.acquire(other_id)):
            assert connection.execute(operation, execution_options=once).scalar() is True
        assert connection.scalar(mutex.release(id)) is True
        connection.execute(update(shipped.task_timeout).where(shipped.task_timeout.c.id == other_id).values(ts=0))
        with pytest.raises(sl.OutcomeUnknown):
            connection.execute(mutex.acquire(id), execution_options=once)
        assert connection.execute(hourly.acquire(other_id), execution_options=once).scalar() is True
        ended = select(shipped.task_timeout.c.ts).where(shipped.task_timeout.c.id == other_id)
        assert (row(other, id).acquired, connection.scalar(ended)) == (False, 0)


@protocols
def test_retried_release_frees_only_its_acquisition(
    id: str, servers: Any, other: Engine, name: str, driver: str
) -> None:
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks, next_one = sl.Locks(engine), sl.Locks(other)
        assert locks.mutex.acquire(id) is True
        proxy.lose_answer(final(name))
        assert locks.mutex.release(id) is True
        assert (proxy.losses, row(other, id).acquired) == (1, False)
        assert locks.mutex.acquire(id) is True
        proxy.lose_answer(final(name), lambda: next_one.mutex.acquire(id))
        with pytest.raises(sl.OutcomeUnknown):
            locks.mutex.release(id)
        assert (proxy.losses, row(other, id).acquired) == (2, True)
        assert next_one.mutex.release(id) is True


@protocols
def test_release_of_another_acquisition_is_not_retried(
    id: str, servers: Any, other: Engine, name: str, driver: str
) -> None:
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks, next_one = sl.Locks(engine), sl.Locks(other)
        assert next_one.mutex.acquire(id) is True
        proxy.lose_answer(final(name), lambda: next_one.mutex.acquire(id))
        with pytest.raises(sl.OutcomeUnknown):
            locks.mutex.release(id)
        assert (proxy.losses, row(other, id).acquired, row(other, id).fence) == (1, True, 2)


@pytest.mark.parametrize("name", ["postgresql15", "sqlite"])
def test_second_release_does_not_free_the_next_holder(id: str, servers: Any, other: Engine, name: str) -> None:
    a, b = sl.Locks(other), sl.Locks(other)
    assert a.mutex.acquire(id) is True
    assert b.mutex.release(id) is True  # by an operator
    assert b.mutex.acquire(id) is True
    assert [a.mutex.release(id), a.mutex.release(id, queue="default")] == [False, False]
    assert b.mutex.release(id) is True
    assert a.mutex.acquire(id) is True
    assert a.mutex.release(id) is True
    assert b.mutex.acquire(id) is True
    assert a.mutex.release(id) is False
    assert a.mutex.release(id, owner=b.owner) is True


@protocols
def test_retries_after_lost_replies_are_limited(id: str, servers: Any, other: Engine, name: str, driver: str) -> None:
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        locks.run(mutex.create(id))
        proxy.lose_answer(final(name), always=True)
        with pytest.raises(sl.OutcomeUnknown):
            locks.mutex.acquire(id)
        proxy.answer_all()
        assert proxy.losses == 4
        assert row(other, id).fence == 1


@protocols
def test_first_try_still_waiting_at_the_server(
    id: str, servers: Any, other: Engine, watch: Callable[[str], Watch], name: str, driver: str
) -> None:
    """Its connection is cut while it waits for the row; the two tries make one acquisition."""
    with in_the_clear(servers, name, driver) as (engine, proxy), Session(other) as holder:
        locks = sl.Locks(engine)
        locks.run(mutex.create(id, retries=5))
        assert holder.scalar(mutex.acquire(id)) is True
        waiting = later(locks.mutex.acquire, id)
        watch(name).until_waiting(waiting)
        before = proxy.accepted
        proxy.cut()
        until(lambda: proxy.accepted > before, unless=waiting)
        watch(name).until_waiting(waiting)
        holder.rollback()
        assert waiting.result(PATIENCE) is True
        assert (row(other, id).fence, row(other, id).retries_left) == (1, 4)
        assert sl.Locks(other).mutex.acquire(id) is False
        assert locks.mutex.release(id) is True
        assert row(other, id).acquired is False


@protocols
@pytest.mark.parametrize("released", [True, False], ids=["released by another", "held"])
def test_release_after_a_second_unknown_acquisition(
    servers: Any, other: Engine, id: str, name: str, driver: str, released: bool
) -> None:
    """Whichever of the two is the current one, it is released."""
    with in_the_clear(servers, name, driver) as (engine, proxy):
        a, b = sl.Locks(engine), sl.Locks(other)
        assert a.mutex.acquire(id) is True
        assert not released or b.mutex.release(id) is True
        proxy.lose_answer(final(name), always=True)
        with pytest.raises(sl.OutcomeUnknown):
            a.mutex.acquire(id)
        proxy.answer_all()
        assert row(other, id).acquired
        assert a.mutex.release(id) is True
        assert not row(other, id).acquired
        assert b.mutex.acquire(id) is True
        assert a.mutex.release(id) is False


@protocols
def test_error_after_a_lost_reply_is_outcome_unknown(
    servers: Any, other: Engine, id: str, name: str, driver: str
) -> None:
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        locks.run(mutex.create(id))
        proxy.lose_answer(final(name), proxy.close)  # the server is no longer reachable
        with pytest.raises(sl.OutcomeUnknown):
            locks.mutex.acquire(id)
    assert row(other, id).acquired


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_lost_reply_about_an_unknown_name_is_no_doubt(servers: Any, name: str) -> None:
    """No attempt has done anything, the one without a reply included."""
    unknown: list[tuple[Any, bytes, type[Exception]]] = [
        (mutex.acquire(unused()), b"UPDATE", sl.UnknownTask),
        (sl.semaphore.acquire({unused("semaphore"): 1}), b"semaphore_acquire", sl.UnknownSemaphore),
    ]
    for operation, request, error in unknown:
        with in_the_clear(servers, name, EVERYWHERE[name]) as (engine, proxy):
            locks = sl.Locks(engine)
            locks.run(mutex.held())
            proxy.lose_answer(request)
            with pytest.raises(error):
                locks.run(operation)
            assert proxy.losses == 1


@protocols
def test_set_retries_is_not_repeated(servers: Any, other: Engine, id: str, name: str, driver: str) -> None:
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks, next_one = sl.Locks(engine), sl.Locks(other)
        locks.run(mutex.create(id, retries=0))
        proxy.lose_answer(final(name), lambda: next_one.mutex.acquire(id) and next_one.mutex.release(id))
        with pytest.raises(sl.OutcomeUnknown):
            locks.run(mutex.set_retries(id, 1))
        assert proxy.losses == 1
        assert next_one.mutex.acquire(id) is False


@pytest.mark.parametrize("type_", [CHAR(40), Uuid()], ids=repr)
@protocols
def test_nonce_is_recognized_in_any_column_type(
    servers: Any, other: Engine, id: str, name: str, driver: str, type_: Any
) -> None:
    own = Table(
        f"own_nonce_{abs(hash(repr(type_))) % 10**8}",
        MetaData(),
        Column("id", String(60), primary_key=True),
        Column("taken", Boolean, nullable=False),
        Column("nonce", type_),
    )
    mine = sl.Mutex(own, id=own.c.id, acquired=own.c.taken, token=own.c.nonce)
    own.create(other, checkfirst=True)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        locks.run(mine.create(id))
        proxy.lose_answer(final(name))
        assert locks.run(mine.acquire(id)) is True
        assert proxy.losses == 1
        assert locks.run(mine.acquire(id)) is False

"""An error that a block ignores loses its lock immediately, where the server aborts the transaction for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conformance.faces import ASYNC, SYNC, Blocking, opened
from tests.faults.drivers import EVERY, free, losing
from tests.fixtures.parties import PATIENCE, connected, installed, later, unused

INNODB = [each for each in EVERY if each[0] in ("mysql", "mariadb")]
POSTGRESQL = [each for each in EVERY if each not in INNODB]
NOTHING = "what was done in it after that is not committed$"
ROLLS_BACK = text("INSERT OR ROLLBACK INTO passed_over (id) VALUES (1)")
TABLE = "CREATE TABLE passed_over (id INTEGER PRIMARY KEY, note INTEGER)"


def on(*drivers: tuple[str, str, str]) -> Any:
    return pytest.mark.parametrize(("name", "driver", "face"), drivers)


@pytest.fixture
def rows(servers: Any, name: str) -> Iterator[Engine]:
    """A table with two light rows, and an engine that leads to it besides the one that is tested."""
    with connected(installed(servers, name)) as engine:
        with engine.begin() as connection:
            connection.execute(text(TABLE))
            connection.execute(text("INSERT INTO passed_over (id) VALUES (1), (2)"))
        yield engine
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE passed_over"))


def insert(number: int) -> Any:
    return text(f"INSERT INTO passed_over (id) VALUES ({number})")


def numbers(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM passed_over ORDER BY id")))


def work(session: Any, call: Callable[[Session], object]) -> None:
    """Call a function of a synchronous session with the session of a block."""
    session.run_sync(call) if isinstance(session, Blocking) else call(session)


def deadlock(other: Engine, ready: threading.Event) -> None:
    """The heavier of two transactions, so that the other is the victim."""
    with other.begin() as connection:
        for number in range(100, 120):
            connection.execute(insert(number))
        connection.execute(text("UPDATE passed_over SET note = 2 WHERE id = 2"))
        ready.set()
        connection.execute(text("UPDATE passed_over SET note = 2 WHERE id = 1"))


@on(*POSTGRESQL)
def test_lock_is_lost_immediately(servers: Any, rows: Engine, name: str, driver: str, face: str) -> None:
    key = unused()
    with opened(face, installed(servers, name, driver)) as (locks, _):
        with losing(locks), locks.exclusive(key) as held:
            held.session.execute(insert(3))
            with pytest.raises(DBAPIError):
                held.session.execute(insert(1))
            assert free(rows, key)
            assert later(lambda: held.lost).result(PATIENCE)  # as another thread sees it
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.check()
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.session.execute(insert(4))
            assert held.lost
    assert numbers(rows) == [1, 2]


@on(*POSTGRESQL, *INNODB)
def test_savepoint_keeps_the_lock(servers: Any, rows: Engine, name: str, driver: str, face: str) -> None:
    key = unused()
    with opened(face, installed(servers, name, driver)) as (locks, _), locks.exclusive(key) as held:

        def savepoints(session: Session) -> None:
            with pytest.raises(DBAPIError), session.begin_nested():
                session.execute(insert(1))
            with session.begin_nested():
                with pytest.raises(DBAPIError), session.begin_nested():
                    with pytest.raises(DBAPIError):
                        session.execute(insert(1))
                    assert not held.lost
                    if face == SYNC and name not in ("mysql", "mariadb"):
                        held.check()
                    raise DBAPIError("passed on", None, Exception())
                session.execute(insert(3))

        work(held.session, savepoints)
        held.check()
        assert not held.lost
        assert not free(rows, key)
    assert numbers(rows) == [1, 2, 3]


@on(*INNODB)
@pytest.mark.parametrize("nested", [False, True])
def test_deadlock_is_a_lost_lock(servers: Any, rows: Engine, name: str, driver: str, face: str, nested: bool) -> None:
    """InnoDB has rolled all of it back, and would go on in a new transaction that nothing guards; no driver tells."""
    key, ready = unused(), threading.Event()
    with opened(face, installed(servers, name, driver)) as (locks, _):
        with losing(locks), locks.exclusive(key) as held:
            held.session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 1"))
            others = later(deadlock, rows, ready)
            assert ready.wait(PATIENCE)
            if nested:
                work(held.session, lambda session: session.begin_nested())
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 2"))
            assert free(rows, key)
            assert held.lost
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.session.execute(insert(3))
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.check()
        others.result(PATIENCE)
    with rows.connect() as connection:
        assert connection.scalar(text("SELECT note FROM passed_over WHERE id = 1")) == 2
    assert 3 not in numbers(rows)


@on(*INNODB[:2])
@pytest.mark.parametrize("error", [DBAPIError, KeyError], ids=["the driver's", "replaced by the app"])
@pytest.mark.parametrize(
    ("make", "operation"),
    [(Session, sl.lock.exclusive), (Engine.connect, sl.lock.exclusive), (Session, sl.Queue().put)],
    ids=["lock in a session", "lock on a connection", "job"],
)
def test_commit_after_a_deadlock_that_was_passed_over(
    servers: Any, rows: Engine, name: str, driver: str, face: str, make: Any, operation: Any, error: Any
) -> None:
    """In a transaction of the app's, what follows was done without the lock, and a job is not there."""
    ready = threading.Event()
    with connected(installed(servers, name, driver)) as engine, make(engine) as session:
        if error is KeyError:
            event.listen(engine, "handle_error", lambda context: {}[str(context.original_exception)])
        session.execute(operation(unused()))
        session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 1"))
        others = later(deadlock, rows, ready)
        assert ready.wait(PATIENCE)
        with pytest.raises(error):
            session.execute(text("UPDATE passed_over SET note = 1 WHERE id = 2"))
        assert len([*engine.dialect.dispatch.handle_error]) < 5  # one of each class of the dialect, and the app's
        session.execute(insert(3))
        with pytest.raises(sl.LockLost, match="roll it back here, too"):
            session.commit()
        session.rollback()
        session.execute(insert(4))
        session.commit()
        others.result(PATIENCE)
    assert 3 not in numbers(rows)
    assert 4 in numbers(rows)


@pytest.mark.parametrize("name", ["sqlite"])
@pytest.mark.parametrize("nested", [False, True])
def test_rollback_by_sqlite_itself(servers: Any, rows: Engine, name: str, nested: bool) -> None:
    with connected(installed(servers, name)) as engine:
        locks = sl.Locks(engine)
        with losing(locks), locks.exclusive(unused()) as held:
            held.session.execute(insert(3))
            if nested:
                held.session.begin_nested()
            connection = held.session.connection()
            with pytest.raises(sl.LockLost, match=NOTHING):
                connection.execute(ROLLS_BACK)
            connection.execute(insert(4))
            assert held.lost
            with pytest.raises(sl.LockLost, match=NOTHING):
                held.session.execute(insert(5))
    assert numbers(rows) == [1, 2]


@pytest.mark.parametrize("name", ["sqlite"])
def test_rollback_by_sqlite_itself_in_a_session(servers: Any, rows: Engine, name: str) -> None:
    with connected(installed(servers, name)) as engine, Session(engine) as session:
        session.execute(sl.lock.exclusive(unused()))
        with pytest.raises(DBAPIError):
            session.execute(ROLLS_BACK)
        session.execute(insert(4))
        with pytest.raises(sl.LockLost, match="roll it back here, too"):
            session.commit()
    assert numbers(rows) == [1, 2]


@on(("postgresql15", "asyncpg", ASYNC))
def test_asyncpg_error_before_sending_keeps_the_lock(
    servers: Any, rows: Engine, name: str, driver: str, face: str
) -> None:
    with opened(face, installed(servers, name, driver)) as (locks, _), locks.exclusive(unused()) as held:
        with pytest.raises(DBAPIError):
            held.session.execute(text("INSERT INTO passed_over (id) VALUES (:id)"), {"id": "not a number"})
        assert not held.lost
        held.session.execute(insert(3))
    assert numbers(rows) == [1, 2, 3]


@on(("postgresql15", "asyncpg", ASYNC))
def test_asyncpg_command_timeout_loses_the_lock(servers: Any, rows: Engine, name: str, driver: str, face: str) -> None:
    """In a statement; and in a COMMIT, whose outcome is unknown then."""
    key, slowly = unused(), f"$$ BEGIN PERFORM pg_sleep({PATIENCE}); RETURN NULL; END $$"
    limit = {"command_timeout": 3}
    with opened(face, installed(servers, name, driver), connect_args=limit) as (locks, _):
        with losing(locks, "its connection died"):  # which is how SQLAlchemy takes it
            with locks.exclusive(key) as held:
                held.session.execute(insert(3))
                with pytest.raises(TimeoutError):
                    held.session.execute(text(f"SELECT pg_sleep({PATIENCE})"))
                assert free(rows, key)
                assert held.lost
        assert numbers(rows) == [1, 2]
        with pytest.raises(sl.OutcomeUnknown), locks.exclusive(key) as held:
            held.session.execute(text(f"CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS {slowly}"))
            held.session.execute(
                text(
                    "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON passed_over DEFERRABLE INITIALLY DEFERRED"
                    " FOR EACH ROW EXECUTE FUNCTION slowly()"
                )
            )
            held.session.execute(insert(4))


@on(*POSTGRESQL[:2])
def test_error_of_a_driver_cursor(servers: Any, rows: Engine, name: str, driver: str, face: str) -> None:
    """What SQLAlchemy doesn't see, such as a COPY, the driver remembers."""
    key = unused()
    with opened(face, installed(servers, name, driver)) as (locks, _):
        with losing(locks), locks.exclusive(key) as held:
            raw: Any = held.session.connection().connection.driver_connection
            cursor = raw.cursor()
            with pytest.raises(raw.IntegrityError if driver == "psycopg" else Exception):
                cursor.execute("INSERT INTO passed_over (id) VALUES (1)")
            cursor.close()
            assert free(rows, key)
            assert held.lost

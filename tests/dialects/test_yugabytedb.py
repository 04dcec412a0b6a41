"""YugabyteDB: which kind of locks is installed, what its flags mean, and how waits for rows end.

On the stand-in, where ``lock_timeout`` doesn't end a wait for a row, as in YugabyteDB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import check, migration_lock
from tests.conftest import Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import unused
from tests.servers import YugabyteDB
from tests.servers.yugabytedb import ADVISORY

SILENCED = {"yb_silence_advisory_locks_not_supported_error": "on"}


@pytest.fixture
def answering(servers: Servers) -> Callable[..., Engine]:
    """An engine of a new database with these settings, or of the last one with other settings."""
    made: list[str] = []

    def engine(new: bool = True, **settings: str) -> Engine:
        if new:
            made.append(servers.database("yugabytedb"))
        server = servers.server("yugabytedb")
        assert isinstance(server, YugabyteDB)
        server.configure(made[-1], **settings)
        return create_engine(servers.url("yugabytedb", "psycopg2", made[-1]), poolclass=NullPool)

    return engine


def kind(engine: Engine) -> str:
    with engine.connect() as connection:
        relkind = connection.scalar(text("SELECT relkind FROM pg_class WHERE oid = 'lock.locked_keys'::regclass"))
    return {"v": "advisory", "r": "table"}[relkind]


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.mark.parametrize(
    ("settings", "locking", "installed"),
    [
        ({}, "native", "table"),
        ({}, "advisory", "advisory"),
        (ADVISORY, "native", "advisory"),
        (ADVISORY, "table", "table"),
        ({**ADVISORY, **SILENCED}, "native", "table"),
    ],
)
def test_the_flag_chooses_the_kind_and_an_option_forces_it(
    answering: Callable[..., Engine], settings: dict[str, str], locking: str, installed: str
) -> None:
    engine = answering(**settings)
    install(url_of(engine), locking=locking)
    assert kind(engine) == installed
    with engine.connect() as connection:
        drift = check(connection)
    if settings or installed == "table":
        assert drift == []
        with sl.Locks(engine).exclusive("a", timeout=5), engine.connect() as connection:
            assert connection.scalar(sl.lock.try_exclusive("a")) is False
        return
    assert "the functions refuse every lock" in drift[0]
    with pytest.raises(sl.Unsupported, match="turn the first on"), sl.Locks(engine).exclusive("a"):
        pass


def test_a_kind_is_never_changed_while_clients_run(answering: Callable[..., Engine]) -> None:
    """Holders of one kind don't see those of the other: a step that is run again leaves what is there."""
    engine = answering()
    install(url_of(engine))
    engine = answering(new=False, **ADVISORY)
    install(url_of(engine))
    assert kind(engine) == "table"
    with engine.connect() as connection:
        assert check(connection) == []
    with sl.Locks(engine).exclusive("a"), engine.connect() as connection:
        assert connection.scalar(sl.lock.try_exclusive("a")) is False
    with pytest.raises(DBAPIError, match="End every process that uses locks"):
        install(url_of(engine), locking="advisory")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE lock.locked_keys")
    install(url_of(engine))
    assert kind(engine) == "advisory"
    with engine.connect() as connection:
        assert check(connection) == []


@pytest.mark.parametrize("make", [sl.lock.exclusive, sl.lock.shared])
def test_functions_that_lock_rows_exclude_those_that_take_their_place(
    answering: Callable[..., Engine], make: Any
) -> None:
    """They acquire the advisory lock, too, where there are any: a revision can change the kind under traffic."""
    engine = answering(**ADVISORY)
    install(url_of(engine), locking="table")
    install(url_of(engine), locking="advisory", schema="other")
    others = engine.execution_options(schema_translate_map={"lock": "other"})
    for first, second in ((engine, others), (others, engine)):
        with first.connect() as holder, second.connect() as connection:
            holder.execute(make("a"))
            assert connection.scalar(sl.lock.try_exclusive("a")) is False
            assert connection.scalar(sl.lock.try_shared("a")) is (make is sl.lock.shared)
            connection.rollback()
            with pytest.raises(sl.LockTimeout):
                connection.execute(sl.lock.exclusive("a").execution_options(locks_wait=1))
    with others.connect() as holder, engine.connect() as connection, engine.connect() as third:
        holder.execute(make("a"))
        assert connection.scalar(sl.lock.try_exclusive("a")) is False
        # and left no row locked
        third.execute(text("SELECT 1 FROM lock.locked_keys FOR UPDATE NOWAIT"))


@pytest.mark.parametrize("settings", [SILENCED, {"yb_enable_advisory_locks": "off"}], ids=["silenced", "off"])
def test_advisory_locks_that_lock_nothing_are_refused(
    answering: Callable[..., Engine], settings: dict[str, str]
) -> None:
    """By the functions themselves, at each call: the flags are a session's, too."""
    engine = answering(**ADVISORY)
    install(url_of(engine))
    with engine.connect() as connection, migration_lock(connection):
        connection.execute(sl.lock.session_exclusive("a"))
    engine = answering(new=False, **settings)
    with engine.connect() as connection:
        for operation in (
            *(make("a") for make in (sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared)),
            sl.lock.exclusive("a", allow_stale=True),
            sl.lock.session_exclusive("a"),
        ):
            with pytest.raises(sl.Unsupported, match="yb_enable_advisory_locks"):
                connection.execute(operation)
            connection.rollback()
        with pytest.raises(sl.Unsupported, match="let one process migrate"), migration_lock(connection):
            pass


def test_a_migration_needs_advisory_locks(engine_to: MakeEngine) -> None:
    with engine_to("yugabytedb").connect() as connection:
        with pytest.raises(sl.Unsupported, match="from 2025.1 on"), migration_lock(connection):
            pass


@pytest.mark.parametrize("name", ["yugabytedb", "yugabytedb-advisory"])
def test_waits_for_rows_end_by_the_time_limit_of_the_statement(engine_to: MakeEngine, name: str) -> None:
    engine, what = engine_to(name, "psycopg2"), unused("semaphore")
    locks, mutex = sl.Locks(engine), sl.Mutex()
    locks.run(sl.semaphore.create(what, 1))
    locks.run(mutex.create(what))
    with engine.connect() as holder, engine.connect() as connection:
        holder.execute(text("SELECT 1 FROM lock.semaphore WHERE name = :name FOR UPDATE"), {"name": what})
        holder.execute(text("SELECT 1 FROM lock.task_state WHERE id = :name FOR UPDATE"), {"name": what})
        with pytest.raises(sl.LockTimeout):
            locks.acquire({what: 1}, timeout=0.1)
        with pytest.raises(sl.LockTimeout):
            locks.run(mutex.acquire(what).execution_options(locks_wait=0.1))
        with pytest.raises(sl.LockTimeout, match="not free in time"):
            connection.execute(sl.semaphore.acquire({what: 1}, external_id=what).execution_options(locks_wait=0.1))
        connection.rollback()
        connection.exec_driver_sql("SET statement_timeout = '70s'")
        connection.execute(mutex.create(unused()).execution_options(locks_wait=5))
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "70s"


@pytest.mark.parametrize("make", [sl.lock.try_exclusive, sl.lock.try_shared])
def test_a_try_asks_once_more_after_a_serialization_failure(answering: Callable[..., Engine], make: Any) -> None:
    engine = answering()
    install(url_of(engine))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SEQUENCE tries")
        connection.exec_driver_sql(
            "CREATE FUNCTION restart() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            " IF mod(nextval('tries'), 3) <> 2 THEN RAISE serialization_failure; END IF; RETURN NEW; END$$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER restart BEFORE INSERT ON lock.locked_keys FOR EACH ROW EXECUTE FUNCTION restart()"
        )
    with engine.connect() as connection:
        assert connection.scalar(make("a")) is True
        assert connection.scalar(make("b")) is False  # it has failed twice
        assert connection.scalar(make("a")) is True
        with engine.connect() as other:
            assert other.scalar(sl.lock.try_exclusive("a")) is False

"""`migration_lock`: of several processes one migrates, the others wait, and nothing is left of one that died."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_locks.alembic import migration_lock, template
from sqlalchemy_locks.errors import LockLost, LockTimeout, Unsupported
from tests.alembic.project import Fresh, run, synchronous
from tests.fixtures.forks import FORKS, _main
from tests.fixtures.parties import PATIENCE

SERVERS = [
    ("postgresql15", "psycopg"),
    ("postgresql18", "psycopg2"),
    ("pgbouncer-postgresql15", "psycopg"),
    ("mysql", "pymysql"),
    ("mariadb", "mariadb+pymysql"),
    ("sqlite", "pysqlite"),
]
#: the package exports the function under the same name
module = sys.modules["sqlalchemy_locks.alembic.migration_lock"]
ASYNC = [("postgresql18", "asyncpg"), ("mysql", "aiomysql")]
REVISION = """\
from alembic import op

revision = "{name}"
down_revision = {down!r}


def upgrade() -> None:
    {create}
    op.execute("INSERT INTO ran (revision) VALUES ('{name}')")
    if op.get_bind().dialect.name == "postgresql":
        with op.get_context().autocommit_block():
            op.execute("CREATE INDEX CONCURRENTLY ran_{name} ON ran (revision)")
"""


@pytest.fixture(params=SERVERS, ids="-".join)
def url(request: pytest.FixtureRequest, fresh: Fresh) -> URL:
    """An empty database."""
    return fresh(*request.param)


@contextmanager
def connected(url: URL, **options: Any) -> Iterator[Connection]:
    engine = sa.create_engine(url, **options)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def run_with(url: URL, migrate: Callable[[Connection], None]) -> None:
    """Call a function with a connection, as a sync or an async ``env.py`` does."""
    if not url.get_dialect().is_async:
        with connected(url) as connection:
            migrate(connection)
        return

    async def main() -> None:
        engine = create_async_engine(url)
        async with engine.connect() as connection:
            await connection.run_sync(migrate)
        await engine.dispose()

    asyncio.run(main())


def project(folder: Path, url: URL, kind: str, revisions: int) -> None:
    """A project of a template, with revisions that fail when two processes run them."""
    from alembic import command
    from alembic.config import Config

    ini = Config(str(folder / "alembic.ini"))
    command.init(ini, str(folder / "migrations"), template=template(kind))
    text, path = url.render_as_string(hide_password=False).replace("%", "%%"), folder / "alembic.ini"
    path.write_text(
        re.sub(r"^sqlalchemy\.url = .*$", lambda _: f"sqlalchemy.url = {text}", path.read_text(), flags=re.M)
    )
    down = None
    for number in range(revisions):
        create = 'op.execute("CREATE TABLE ran (revision VARCHAR(9) PRIMARY KEY)")' if not number else "pass"
        body = REVISION.format(name=f"r{number}", down=down, create=create)
        (folder / f"migrations/versions/r{number}.py").write_text(body)
        down = f"r{number}"


def upgraded(folder: Path, processes: int) -> list[tuple[int | None, str]]:
    """Run ``alembic upgrade heads`` in several processes at once; return their exit codes and what they printed."""
    started = []
    for number in range(processes):
        output = [folder / f"out{number}", folder / f"err{number}"]
        # each in a folder of its own: it writes its output there
        process = FORKS.Process(target=_main, args=("alembic.config", folder, ("upgrade", "heads"), output))
        process.start()
        started.append((process, output))
    for process, _ in started:
        process.join(PATIENCE)
    return [(process.exitcode, output[1].read_text()) for process, output in started]


# without those whose server another one has, behind PgBouncer or with the same lock
@pytest.mark.parametrize(
    ("server", "driver"), [*(each for each in SERVERS if each[0] not in ("postgresql15", "mariadb")), *ASYNC]
)
def test_of_several_processes_one_migrates(fresh: Fresh, tmp_path: Path, server: str, driver: str) -> None:
    url = fresh(server, driver)
    project(tmp_path, url, "async" if (server, driver) in ASYNC else "generic", 3)
    ended = upgraded(tmp_path, 4)
    assert [code for code, _ in ended] == [0] * 4, "\n".join(text for _, text in ended)
    upgrades = [text.count("Running upgrade") for _, text in ended]
    assert sorted(upgrades)[:3] == [0, 0, 0], "one runs everything, the others find nothing to do"
    assert run(synchronous(url), "SELECT revision FROM ran ORDER BY revision") == [("r0",), ("r1",), ("r2",)]


def test_a_waiting_process_names_the_migrating_one(
    url: URL, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MESSAGE_EVERY", 0.01)
    with connected(url) as one, connected(url) as other:
        with migration_lock(one), pytest.raises(LockTimeout, match=r"within 0.2 s: it is held by .+ \d+.*; nothing"):
            with migration_lock(other, timeout=0.2):
                pytest.fail("both are inside")
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith("Waiting for 0 s more for the migration lock 'alembic', held by ")
        with migration_lock(other, timeout=0), migration_lock(one, name="another", timeout=0):
            pass
        assert not one.in_transaction()
        assert not other.in_transaction()


@pytest.mark.parametrize("options", [{}, {"isolation_level": "AUTOCOMMIT"}], ids=str)
def test_it_needs_no_connection_of_the_pool_and_sends_nothing_on_the_one_that_migrates(
    url: URL, options: dict[str, Any]
) -> None:
    statements: list[str] = []
    with connected(url, poolclass=sa.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.1, **options) as connection:
        sa.event.listen(
            connection, "before_cursor_execute", lambda c, cursor, statement, *_: statements.append(statement)
        )
        with migration_lock(connection):
            assert statements == []
            connection.execute(sa.text("SELECT 1"))
            connection.commit()
            with connected(url) as other, pytest.raises(LockTimeout), migration_lock(other, timeout=0):
                pytest.fail("a commit of the migrations has ended it")
        assert statements == ["SELECT 1"]


def kill(url: URL) -> None:
    """End all sessions of the database that hold the lock."""
    if url.get_backend_name() == "postgresql":
        run(
            url,
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
        return
    for (id_,) in run(
        url, f"SELECT id FROM information_schema.processlist WHERE db = '{url.database}' AND id <> CONNECTION_ID()"
    ):
        if run(
            url,
            f"SELECT 1 FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id WHERE object_type = 'USER LEVEL LOCK' AND t.processlist_id = {id_}",
        ):
            run(url, f"KILL {id_}")


@pytest.mark.parametrize(
    ("server", "driver"), [("postgresql15", "psycopg"), ("postgresql18", "psycopg2"), ("mysql", "pymysql")]
)
def test_a_lost_lock_stops_the_migrations(fresh: Fresh, server: str, driver: str) -> None:
    url = fresh(server, driver)
    ended = []
    for versioned in (True, False):
        with connected(url) as connection:
            with pytest.raises(LockLost, match="another process may migrate"), migration_lock(connection):
                connection.execute(sa.text("SELECT 1"))
                kill(url)
                if versioned:  # a revision has ended, and the next one begins
                    connection.execute(sa.text("SELECT 'alembic_version'"))
                    connection.execute(sa.text("SELECT 2"))
                    pytest.fail("the next revision has begun")
                ended.append(versioned)
    assert ended == [False], "at the end it is asked in any case"


def _hold(url: str, inside: Any) -> None:
    with connected(sa.make_url(url)) as connection, migration_lock(connection):
        inside.set()
        signal.pause()


def test_it_ends_with_its_process(url: URL) -> None:
    inside = FORKS.Event()
    process = FORKS.Process(target=_hold, args=(url.render_as_string(hide_password=False), inside))
    process.start()
    assert inside.wait(PATIENCE)
    with connected(url) as connection:
        with pytest.raises(LockTimeout), migration_lock(connection, timeout=0):
            pytest.fail("both are inside")
        os.kill(process.pid or 0, signal.SIGKILL)
        with migration_lock(connection, timeout=PATIENCE):
            pass
    process.join(PATIENCE)


@pytest.mark.parametrize(("server", "driver"), [("postgresql15", "psycopg"), ("postgresql18", "asyncpg")])
def test_what_the_role_limits_does_not_end_it(fresh: Fresh, server: str, driver: str) -> None:
    """A role's default level would give the holder a snapshot, which CREATE INDEX CONCURRENTLY waits for."""
    url = fresh(server, driver)
    plain = synchronous(url)
    role = "ALTER ROLE CURRENT_USER IN DATABASE " + str(url.database)
    limits = {"idle_in_transaction_session_timeout": "'100ms'", "default_transaction_isolation": "'repeatable read'"}
    if server == "postgresql18":
        limits["transaction_timeout"] = "'300ms'"
    run(plain, *(f"{role} SET {name} = {value}" for name, value in limits.items()))

    def migrate(connection: Connection) -> None:
        with migration_lock(connection):
            run(
                plain,
                "CREATE TABLE big (id int)",
                "SET statement_timeout = '10s'",
                "CREATE INDEX CONCURRENTLY big_id ON big (id)",
                *["SELECT pg_sleep(0.2)"] * 2,
            )

    run_with(url, migrate)


@pytest.mark.parametrize(
    ("server", "driver"), [("postgresql15", "psycopg"), ("postgresql18", "asyncpg"), ("mysql", "aiomysql")]
)
def test_its_connection_is_never_idle_for_long(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch, server: str, driver: str
) -> None:
    monkeypatch.setattr(module, "_PING_EVERY", 0.01)
    url, pings = fresh(server, driver), threading.Semaphore(0)

    def noted(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SET LOCAL") or "IS_USED_LOCK" in statement:
            pings.release()

    def migrate(connection: Connection) -> None:
        sa.event.listen(connection.engine, "before_cursor_execute", noted)
        sleep = "SELECT pg_sleep(0.05)" if server.startswith("postgresql") else "SELECT SLEEP(0.05)"
        with migration_lock(connection):
            while not (pings.acquire(blocking=False) and pings.acquire(blocking=False)):
                connection.execute(sa.text(sleep))

    run_with(url, migrate)


def test_a_database_in_memory_needs_none() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection, migration_lock(connection), migration_lock(connection, timeout=0):
        connection.execute(sa.text("CREATE TABLE t (id INTEGER)"))
    engine.dispose()


def test_a_file_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "app.db-migration").mkdir()
    with connected(sa.make_url(f"sqlite:///{tmp_path / 'app.db'}")) as connection:
        with pytest.raises(Unsupported, match="app.db-migration"), migration_lock(connection):
            pytest.fail("it is inside without a lock")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": ""}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"timeout": "5m"}, TypeError),
        ({"name": 1}, TypeError),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception]) -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(error), migration_lock(connection, **arguments):
        pass
    with pytest.raises(TypeError, match="run_sync"), migration_lock(engine):  # type: ignore[arg-type]
        pass
    engine.dispose()

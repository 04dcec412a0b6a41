"""The backup service: its README's commands, its own tests, and a worker that is killed in the middle."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import BigInteger, Column, Engine, MetaData, String, Table, text, update

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.examples.served import commands, copied, done, running
from tests.fixtures.parties import PATIENCE, connected, later, until

_tables = MetaData()
target = Table(
    "target",
    _tables,
    Column("id", BigInteger, primary_key=True),
    Column("latest_id", BigInteger),
    Column("fence", BigInteger),
)
backup = Table("backup", _tables, Column("id", BigInteger, primary_key=True), Column("state", String(10)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied("backup", tmp_path)


def urls(servers: Servers) -> tuple[str, str]:
    """A new database: as the service takes it, and for a synchronous driver."""
    name = servers.database("postgresql15")
    return servers.url("postgresql15", "asyncpg", name), servers.url("postgresql15", PLAIN["postgresql15"], name)


def test_readme_commands_run(folder: Path) -> None:
    install, serve = commands(folder)
    done(install, folder)
    with running(serve.replace("--port 8000", "--port 0"), folder, WAIT_SECONDS=str(PATIENCE)) as server:
        with httpx.Client(base_url=server.address(), timeout=PATIENCE) as client:
            assert client.post("/targets", json={"name": "mail"}).status_code == 201
            assert client.put("/targets/1/documents/inbox", json={"body": "hello"}).status_code == 204
            made = client.post("/targets/1/backups", headers={"Idempotency-Key": "monday"})
            assert made.status_code == 201, made.text
            assert made.json()["documents"] == {"inbox": "hello"}
            assert client.get("/docs").status_code == 200
            assert ">backup-slots<" in client.get("/locks/").text
        server.end()
        assert "Application shutdown complete" in server.said
        assert "Traceback" not in server.said
    assert (folder / "backup.db").is_file()


def test_own_tests_pass_then_migrations_go_down(folder: Path, servers: Servers) -> None:
    url, plain = urls(servers)
    said = done("python -m pytest tests -q -p no:cacheprovider", folder, DATABASE_URL=url)
    assert " passed" in said
    assert "skipped" not in said
    migrations = "upgrade heads", "check", "downgrade backup@base", "downgrade sqlalchemy_locks@base"
    code = "import sys; from alembic.config import main; [main(command.split()) for command in sys.argv[1:]]"
    done(f"python -c {shlex.quote(code)} {shlex.join(migrations)}", folder, DATABASE_URL=url)
    with connected(plain) as database, database.connect() as connection:
        assert connection.dialect.get_table_names(connection) == ["alembic_version"]


def test_slot_of_a_killed_worker_is_released(folder: Path, servers: Servers) -> None:
    """The slot is free after its time to live, the next order gets it, and late writes are refused."""
    url, plain = urls(servers)
    install, serve = commands(folder)
    serve = serve.replace("--port 8000", "--port 0")
    done(install, folder, DATABASE_URL=url)
    both = {"DATABASE_URL": url, "SLOTS": "1", "WAIT_SECONDS": str(PATIENCE)}
    slow, quick = {**both, "SLOT_TTL": "3", "COPY_SECONDS": "3600"}, {**both, "SLOT_TTL": "3600"}
    with connected(plain) as database, running(serve, folder, **slow) as first:
        ask(first.address(), "POST", "/targets", json={"name": "mail"})
        ask(first.address(), "PUT", "/targets/1/documents/inbox", json={"body": "hello"})
        order = later(ask, first.address(), "POST", "/targets/1/backups", headers={"Idempotency-Key": "first"})
        until(lambda: state(database, "first") == "running", unless=order)
        first.end(kill=True)
        with pytest.raises(httpx.TransportError):
            order.result(PATIENCE)
        with running(serve, folder, **quick) as second:
            made = ask(second.address(), "POST", "/targets/1/backups", headers={"Idempotency-Key": "second"})
            assert (made.status_code, made.json()["state"]) == (201, "done")
            assert state(database, "first") == "failed"
            dead_writes(database)
            assert state(database, "first") == "failed"
            # its client comes again, with its key: the backup is made now
            again = ask(second.address(), "POST", "/targets/1/backups", headers={"Idempotency-Key": "first"})
            assert (again.status_code, again.json()["state"]) == (201, "done")
            assert ask(second.address(), "GET", "/slots").json() == {"capacity": 1, "used": 0}
            second.end()
        assert state(database, "first") == "done"


def dead_writes(database: Engine) -> None:
    """Execute the remaining statements of the killed worker, with its token."""
    with database.connect() as connection:
        its, token = connection.execute(text("SELECT id, token FROM backup WHERE \"key\" = 'first'")).one()
    latest = update(target).where(target.c.id == 1).values(latest_id=its)
    with database.connect() as connection, pytest.raises(sl.StaleToken):
        connection.execute(sl.fenced(latest, target.c.fence, token))
    finish = update(backup).where(backup.c.id == its).values(state="done")
    with database.connect() as connection, pytest.raises(sl.LockLost):
        connection.execute(sl.guarded(finish, "first"))


def state(database: Engine, key: str) -> str | None:
    with database.connect() as connection:
        return connection.scalar(text('SELECT state FROM backup WHERE "key" = :key'), {"key": key})


def ask(address: str, method: str, path: str, **named: Any) -> httpx.Response:
    return httpx.request(method, f"{address}{path}", timeout=PATIENCE, **named)

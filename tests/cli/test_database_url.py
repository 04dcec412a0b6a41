"""The database that a command works on, with any driver; passwords are never printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import make_url

from sqlalchemy_locks.cli import status
from tests.cli.conftest import Cli, run
from tests.conftest import Servers, install

SECRET = "s3cr:t/@ w%rd"
DRIVERS = [
    ("postgresql15", "psycopg2"),
    ("postgresql15", "asyncpg"),
    ("mysql", "aiomysql"),
    ("mysql", "asyncmy"),
    ("sqlite", "aiosqlite"),
    ("yugabytedb", "yugabytedb"),
]


@pytest.mark.parametrize(("engine", "driver"), DRIVERS)
def test_commands_with_any_driver(engine: str, driver: str, servers: Servers) -> None:
    cli = Cli(servers.installed(engine, driver))
    told = cli.json("check")
    assert told["ok"] is True
    assert f"through {make_url(cli.url).get_dialect().driver}" in told["findings"][0]["says"]
    cli.json("status")
    cli("sweep")
    assert cli.json("semaphore", "create", f"by {driver}", "2")["capacity"] == 2


def test_install_with_an_async_driver(servers: Servers) -> None:
    cli = Cli(servers.fresh("postgresql15", "asyncpg"))
    cli("install")
    assert cli.json("check")["ok"] is True


def test_sources_of_the_url(servers: Servers, tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in "abcd"]
    for url in urls:
        install(url)
    ini = tmp_path / "alembic.ini"
    ini.write_text(f"[alembic]\nscript_location = x\nsqlalchemy.url = {urls[3]}\n")
    variables = {"SQLALCHEMY_LOCKS_URL": urls[1], "DATABASE_URL": urls[2]}

    def asked(*arguments: str, **environment: str) -> str:
        done = run("status", "--json", *arguments, **environment)
        assert done.exit_code == 0, done.output
        return str(json.loads(done.stdout)["database"])

    assert asked("--url", urls[0], **variables) == urls[0]
    assert asked("--config", str(ini), **variables) == urls[3]
    assert asked(**variables) == urls[1]
    assert asked(DATABASE_URL=urls[2]) == urls[2]
    done = run("status")
    assert done.exit_code == 2
    assert "Give --url" in done.stderr
    done = run("status", "--url", urls[0], "-c", str(ini))
    assert done.exit_code == 2
    assert "give one of them" in done.stderr


def test_config_names_schema_and_prefix(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    install(url, prefix="others_")
    ini = tmp_path / "alembic.ini"
    ini.write_text(f"[alembic]\nscript_location = x\nsqlalchemy.url = {url}\nsqlalchemy_locks_prefix = others_\n")
    assert "not installed" not in run("status", "-c", str(ini)).stdout
    assert "not installed" in run("status", "-c", str(ini), "--prefix", "lock_").stdout
    ini.write_text("[alembic]\nscript_location = x\n")
    done = run("status", "-c", str(ini))
    assert done.exit_code == 2
    assert "has no sqlalchemy.url" in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"postgresql//app:{SECRET}@host/db", "can't be read"),
        (f"postgresql+psycopg://app:{'s3cret-word'}@host:port/db", "can't be read"),
        ("oracle://app:s3cret-word@host/db", "does not know the engine"),
        ("postgres://app:s3cret-word@host/db", "knows no dialect"),
        ("mysql+mysqldb://app:s3cret-word@host/db", "is not installed"),
        ("postgresql+psycopg://me:s3cret-word@two@127.0.0.1/app", "%40"),
        ("mysql+pymysql://me:s3cret-word@/two@127.0.0.1/app", "%40"),
        ("sqlite:////nowhere/at/all.db", "no such file"),
        ("mysql+pymysql://app:s3cret-word@127.0.0.1:1/db?nonsense=1", "unexpected keyword argument 'nonsense'"),
    ],
)
@pytest.mark.parametrize("command", ["check", "install"])
def test_unusable_urls_are_refused(url: str, said: str, command: str) -> None:
    if said == "no such file" and command == "install":
        said = "unable to open"  # it would create the file
    done = run(command, "--url", url)
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.output.split())
    for secret in (SECRET, "s3cret-word"):
        assert secret not in done.output
    assert "Traceback" not in done.output


UNREACHABLE = ["postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg", "mysql+pymysql", "mysql+aiomysql"]


@pytest.mark.parametrize("drivername", UNREACHABLE)
def test_no_password_if_server_is_unreachable(drivername: str) -> None:
    url = make_url(f"{drivername}://app@127.0.0.1:1/db").set(password=SECRET)
    written = url.render_as_string(hide_password=False)
    done = run("status", SQLALCHEMY_LOCKS_URL=written)
    assert done.exit_code == 2
    assert "app:***@127.0.0.1:1/db" in done.output
    assert SECRET not in done.output
    assert written.split("app:")[1].split("@127")[0] not in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_no_password_if_login_fails(driver: str, servers: Servers) -> None:
    # without TLS: asyncpg leaves the transport of a refused TLS connection open
    url = make_url(servers.server("postgresql18").url(driver)).set(password=SECRET, database="nonexistent-db")
    done = run("check", SQLALCHEMY_LOCKS_URL=url.render_as_string(hide_password=False))
    assert done.exit_code == 2
    assert done.stderr.startswith(f"sqlalchemy-locks: postgresql+{driver}://")
    assert SECRET not in done.output


def test_no_password_in_tracebacks(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(database: object, limit: int) -> None:
        raise RuntimeError("the password is url-secret")

    monkeypatch.setattr(status, "_read", fail)
    url = make_url(servers.installed("postgresql15", "psycopg")).set(password="url-secret")
    done = run("status", SQLALCHEMY_LOCKS_URL=url.render_as_string(hide_password=False))
    assert done.exit_code == 2
    assert "RuntimeError: the password is ***" in done.stderr
    assert "please report it" in done.stderr
    assert "url-secret" not in done.output


@pytest.mark.parametrize(
    "content",
    [f"[alembic]\nsqlalchemy.url = postgresql+psycopg://me:%40{SECRET[-3:]}@host/app\n", f"{SECRET}\n", "\udcff\n"],
)
def test_unreadable_config_is_not_quoted(content: str, tmp_path: Path) -> None:
    ini = tmp_path / "alembic.ini"
    ini.write_bytes(content.encode("utf-8", "surrogateescape"))
    done = run("check", "--config", str(ini))
    assert done.exit_code == 2, done.output
    assert "can't be read" in " ".join(done.stderr.split())
    assert SECRET not in done.output
    assert SECRET[-3:] not in done.output

"""The database that a command works on, with any driver; passwords are never printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from sqlalchemy_locks.cli import base, status
from sqlalchemy_locks.cli.connect import DatabaseUrl
from tests.cli.conftest import Cli, run
from tests.conftest import PLAIN, Servers, install

SECRET = "s3cr:t/@ w%rd"
DRIVERS = [
    ("postgresql15", "psycopg"),
    ("postgresql15", "psycopg2"),
    ("postgresql15", "asyncpg"),
    ("mysql", "pymysql"),
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
    cli("vacuum")
    assert cli.json("semaphore", "create", f"by {driver}", "2")["capacity"] == 2


def test_install_with_an_async_driver(servers: Servers) -> None:
    cli = Cli(servers.fresh("postgresql15", "asyncpg"))
    cli("install")
    assert cli.json("check")["ok"] is True


def test_page_refuses_an_async_driver(postgresql: Cli) -> None:
    url = postgresql.url.replace("+psycopg:", "+asyncpg:")
    done = run("page", "--url", url)
    assert done.exit_code == 2
    assert "postgresql+asyncpg" in " ".join(done.stderr.split())


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
    ("given", "driver"),
    [("postgres", "psycopg"), ("postgresql", "psycopg"), ("mysql", "pymysql"), ("mariadb", "pymysql")],
)
def test_url_without_driver_gets_an_installed_one(given: str, driver: str, servers: Servers) -> None:
    server = "mariadb" if given == "mariadb" else "mysql" if given == "mysql" else "postgresql15"
    url = servers.installed(server, PLAIN[server])
    told = Cli(f"{given}:{url.split(':', 1)[1]}").json("check")
    assert told["findings"][0]["says"].count(f"through {driver},") == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"postgresql//app:{SECRET}@host/db", "can't be read"),
        (f"postgresql+psycopg://app:{'s3cret-word'}@host:port/db", "can't be read"),
        ("oracle://app:s3cret-word@host/db", "does not know the engine"),
        ("postgresql+nothing://app:s3cret-word@host/db", "knows no dialect"),
        ("mysql+mysqldb://app:s3cret-word@host/db", "No driver is installed"),
        ("sqlite:////nowhere/at/all.db", "there is no file"),
        ("mysql+pymysql://app:s3cret-word@127.0.0.1:1/db?nonsense=1", "unexpected keyword argument 'nonsense'"),
        ("sqlite://", "in memory ends with this command"),
        ("sqlite:///:memory:", "in memory ends with this command"),
        ("sqlite:///file::memory:?cache=shared&uri=true", "in memory ends with this command"),
        ("sqlite:///file:shared?mode=memory&uri=true", "in memory ends with this command"),
    ],
)
@pytest.mark.parametrize("command", ["check", "install"])
def test_unusable_urls_are_refused(url: str, said: str, command: str) -> None:
    if said == "there is no file" and command == "install":
        said = "unable to open"  # it would create the file
    done = run(command, "--url", url)
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.output.split())
    for secret in (SECRET, "s3cret-word"):
        assert secret not in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("drivername", "said"),
    [
        ("postgresql+asyncpg", "'sqlalchemy-locks[cli,asyncpg]' brings it"),
        ("mysql+aiomysql", "'sqlalchemy-locks[cli,aiomysql]' brings it"),
        ("mariadb+pymysql", "'sqlalchemy-locks[cli,mysql]' brings it"),
        ("sqlite+aiosqlite", "'sqlalchemy-locks[cli,sqlite-async]' brings it"),
        ("mysql+asyncmy", "no extra brings asyncmy"),
    ],
)
def test_missing_driver_names_its_extra(drivername: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, drivername.partition("+")[2], None)
    done = run("check", "--url", f"{drivername}://host/db")
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


UNREACHABLE = ["postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg", "mysql+pymysql", "mysql+aiomysql"]


@pytest.mark.parametrize("drivername", UNREACHABLE)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_password_if_server_is_unreachable(drivername: str, as_json: bool) -> None:
    url = make_url(f"{drivername}://app@127.0.0.1:1/db").set(password=SECRET)
    written = url.render_as_string(hide_password=False)
    done = run("status", *(["--json"] if as_json else []), SQLALCHEMY_LOCKS_URL=written)
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


def test_no_password_in_tracebacks(postgresql: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    url = make_url(postgresql.url).update_query_dict({"sslpassword": "query-secret"})
    url = url.set(password="url-secret")

    def fail(database: object, limit: int) -> None:
        raise RuntimeError(f"{url.render_as_string(hide_password=False)} url-secret dbname=x password='other secret'")

    monkeypatch.setattr(status, "_read", fail)
    monkeypatch.setattr(base, "_connect_once", lambda database: 0.0)
    done = run("status", "--json", SQLALCHEMY_LOCKS_URL=url.render_as_string(hide_password=False))
    assert done.exit_code == 2
    assert "RuntimeError" in done.stderr
    assert "please report it" in done.stderr
    assert json.loads(done.stdout)["error"] == "Unforeseen"
    for secret in ("url-secret", "query-secret", "other secret"):
        assert secret not in done.output


CONFIGURATIONS = [
    (
        f"[alembic]\nsqlalchemy.url = postgresql+psycopg://me:%40{SECRET[-3:]}@host/app\n",
        "a percent sign is written %%",
    ),
    ("[alembic]\nsqlalchemy.url = %(DB_URL)s\n", "stands for another option"),
    ("[other]\n", "no configuration with a section [alembic]"),
    (f"{SECRET}\n", "no configuration with a section [alembic]"),
    ("\udcff\n", "no configuration with a section [alembic]"),
]


@pytest.mark.parametrize(("content", "said"), CONFIGURATIONS)
def test_unreadable_config_is_not_quoted(content: str, said: str, tmp_path: Path) -> None:
    ini = tmp_path / "alembic.ini"
    ini.write_bytes(content.encode("utf-8", "surrogateescape"))
    done = run("check", "--config", str(ini), "--json")
    assert done.exit_code == 2, done.output
    assert said in json.loads(done.stdout)["message"]
    assert SECRET not in done.output
    assert SECRET[-3:] not in done.output


@pytest.mark.parametrize("drivername", ["postgresql+psycopg", "mysql+pymysql"])
@pytest.mark.parametrize("password", ["one@two", "one@/two", "o@ne/two:three"])
def test_unquoted_at_sign_in_password(drivername: str, password: str) -> None:
    done = run("check", "--url", f"{drivername}://me:{password}@127.0.0.1/app")
    assert done.exit_code == 2
    assert "two" not in done.output
    assert "%40" in done.stderr


def test_mysql_url_needs_a_database() -> None:
    for url in ("mysql+pymysql://me@host", "mariadb+pymysql://me@host/"):
        done = run("check", "--url", url)
        assert done.exit_code == 2
        assert "names no database" in done.stderr


@pytest.mark.parametrize(
    ("said", "redacted"),
    [
        ("postgresql://app:hunter22@host", "postgresql://app:***@host"),
        ("dsn host=x password=hunter22 user=app", "dsn host=x password=*** user=app"),
        ("{'password': 'hunter22', 'user': 'app'}", "{'password': ***, 'user': 'app'}"),
        ("invalid hunter22 here", "invalid *** here"),
        ('password authentication failed for user "app"', 'password authentication failed for user "app"'),
    ],
)
def test_redaction(said: str, redacted: str) -> None:
    target = DatabaseUrl(make_url("postgresql+psycopg://app:hunter22@host/db"), "lock", "lock_")
    assert target.redact(said) == redacted


def test_password_equal_to_user_name() -> None:
    target = DatabaseUrl(make_url("postgresql+psycopg://postgres:postgres@host/db"), "lock", "lock_")
    assert target.redact('no user "postgres"') == 'no user "postgres"'
    assert target.redact("postgresql://postgres:postgres@host") == "postgresql://postgres:***@host"
    assert target.display == "postgresql+psycopg://postgres:***@host/db"

"""The templates, as a user meets them: the `alembic` command in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import template
from sqlalchemy_locks.alembic.steps import STEPS
from tests.alembic.project import Fresh, catalog, execute, installed, run, synchronous, tables
from tests.fixtures.forks import main

#: A driver of each kind, in the template that it is for; SQLite has those of the README and of the docs' page below and
#: in test_docs_page.py, and what the revisions make is compared on every engine elsewhere.
DRIVERS = [("generic", "postgresql18", "psycopg"), ("async", "postgresql15", "asyncpg"), ("async", "mysql", "aiomysql")]


class Shell:
    """A folder in which `alembic` is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def alembic(self, *arguments: str, fails: bool = False) -> str:
        status, out, err = main("alembic.config", self.folder, *arguments)
        assert (status != 0) is fails, out + err
        return out + err if fails else out

    def ini(self, pattern: str, replacement: str) -> None:
        path = self.folder / "alembic.ini"
        text, found = re.subn(pattern, lambda _: replacement, path.read_text(), flags=re.MULTILINE)
        assert found == 1
        path.write_text(text)

    def connect(self, url: URL) -> None:
        text = url.render_as_string(hide_password=False).replace("%", "%%")
        self.ini(r"^sqlalchemy\.url = .*$", f"sqlalchemy.url = {text}")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(("name", "server", "driver"), DRIVERS)
def test_init_upgrade_downgrade_and_offline(fresh: Fresh, shell: Shell, name: str, server: str, driver: str) -> None:
    url = fresh(server, driver)
    plain = synchronous(url)
    shell.alembic("init", "-t", template(name), "migrations")
    shell.connect(url)
    shell.alembic("revision", "-m", "first")
    shell.alembic("upgrade", "heads")
    shell.alembic("revision", "-m", "second")
    shell.alembic("upgrade", "heads")
    assert len(list((shell.folder / "migrations/versions").glob("*.py"))) == 2
    assert installed(plain) == [(step, "revisions") for step in STEPS]
    made = catalog(plain)
    shell.alembic("downgrade", "sqlalchemy_locks@base")
    assert catalog(plain) == {}
    assert len(run(plain, "SELECT * FROM alembic_version")) == 1
    run(plain, "DROP TABLE alembic_version")
    execute(plain, shell.alembic("upgrade", "sqlalchemy_locks@head", "--sql"))
    assert catalog(plain) == made


def test_the_options_of_the_ini_file(fresh: Fresh, shell: Shell) -> None:
    """Each line that the template has commented out."""
    generic, other = ((Path(template(name)) / "alembic.ini.mako").read_text() for name in ("generic", "async"))
    assert generic.splitlines()[1:] == other.splitlines()[1:]
    url = fresh("postgresql15", "psycopg")
    run(url, f"CREATE ROLE app_{url.database}")
    shell.alembic("init", "-t", template("generic"), "migrations")
    shell.connect(url)
    shell.ini(r"^# sqlalchemy_locks_prefix = lock_$", "sqlalchemy_locks_prefix = my_")
    shell.ini(r"^# sqlalchemy_locks_schema = lock$", "sqlalchemy_locks_schema = my_locks")
    shell.ini(r"^# sqlalchemy_locks_grant_to =$", f"sqlalchemy_locks_grant_to = app_{url.database}")
    shell.ini(r"^# sqlalchemy_locks_locking = native$", "sqlalchemy_locks_locking = table")
    shell.alembic("upgrade", "heads")
    assert {name for name, kind, *_ in catalog(url, "my_locks")["relations"] if kind == "r"} == set(
        tables("postgresql")
    )
    for table in set(tables("postgresql")) - {"installed"}:
        acl = run(url, f"SELECT relacl::text FROM pg_class WHERE oid = 'my_locks.{table}'::regclass")
        assert f"app_{url.database}=arwd/" in acl[0][0]


def test_the_commands_of_the_readme(fresh: Fresh, shell: Shell) -> None:
    """Without a database, as the README says: the flags take the place of env.py."""
    shell.alembic("init", "-t", template("generic"), "migrations")
    shell.ini(r"^revision_environment = true$", "")
    readme = (shell.folder / "migrations/README").read_text().replace("<this folder>", "migrations")
    for line in re.findall(r"alembic (revision .*--head .*)", readme):
        shell.alembic(*re.findall(r'"[^"]*"|\S+', line.replace('"', "")))
    versions = shell.folder / "migrations/versions"
    first, second = (next(versions.glob(f"*_{name}.py")) for name in ("first", "second"))
    assert re.search(r"^down_revision: .* = None$", first.read_text(), flags=re.MULTILINE)
    assert f"= '{first.name.split('_')[0]}'" in second.read_text()
    shell.connect(fresh("sqlite", "pysqlite"))
    for line in re.findall(r"^    alembic ((?:up|down)grade \S+)", readme, flags=re.MULTILINE):
        shell.alembic(*line.split())


def test_a_refusal_prints_a_sentence_without_traceback(fresh: Fresh, shell: Shell) -> None:
    shell.alembic("init", "-t", template("generic"), "migrations")
    shell.connect(url := fresh("sqlite", "pysqlite"))
    shell.ini(r"^# sqlalchemy_locks_grant_to =$", "sqlalchemy_locks_grant_to = app")
    lock = Path(f"{url.database}-migration")
    lock.mkdir()
    said = shell.alembic("upgrade", "heads", fails=True)
    assert "Migrations run without a lock" in said, "fileConfig() in env.py has disabled the logger"
    assert "Traceback" not in said
    assert "grant_to is refused on SQLite" in said

"""A project with Alembic, run in this process, and what its database contains afterwards."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymysql
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import URL, Connection

from sqlalchemy_locks.alembic import Options, check, template
from sqlalchemy_locks.alembic import steps as steps_
from sqlalchemy_locks.alembic.script import Family

Fresh = Callable[[str, str], URL]

_REVISION = '''\
"""Locks."""
from alembic import op
from sqlalchemy_locks.alembic import ops

revision = {revision!r}
down_revision = {down!r}

def upgrade() -> None:
    op.upgrade_locks(from_="{from_}", to="{to}"{options})

def downgrade() -> None:
    op.downgrade_locks(from_="{to}", to="{from_}"{options})
'''


_SHIPPED_REVISION = '''\
"""A later release's."""
from alembic import op
from sqlalchemy_locks.alembic import revisions

revision = "sqlalchemy_locks_{step}"
down_revision = "sqlalchemy_locks_{before}"

def upgrade() -> None:
    revisions.upgrade(op, "{step}")

def downgrade() -> None:
    revisions.downgrade(op, "{step}")
'''


def revision(from_: str = "base", to: str | None = None, **options: Any) -> str:
    """A revision of the app with the directives: of all steps, or of those above one."""
    to = to or steps_.STEPS[-1]
    down = None if from_ == "base" else f"a{from_}"
    keywords = "".join(f", {name}={value!r}" for name, value in options.items())
    return _REVISION.format(revision=f"a{to}", down=down, from_=from_, to=to, options=keywords)


def tables(family: Family) -> list[str]:
    """The names of this library's tables, in the order in which they are created."""
    return list(dict.fromkeys(name for step in steps_.STEPS for name in steps_.load(step).TABLES[family]))


def functions() -> dict[str, str]:
    """This library's functions, with the types of their arguments."""
    return {name: takes for step in steps_.STEPS for name, takes in steps_.load(step).FUNCTIONS.items()}


class Project:
    """Alembic's configuration without an ini file, whose logging would outlive the test.

    With directives, all steps are in one revision of the app or, if ``stepwise``, each in its own.
    """

    def __init__(self, path: Path, url: URL, installed_by: str, *, stepwise: bool = False, **options: Any) -> None:
        self.url = url
        self.installed_by = installed_by
        versions = path / "versions"
        if not versions.exists():
            versions.mkdir(parents=True)
            for name in ("env.py", "script.py.mako"):
                shutil.copy(Path(template("generic")) / name, path / name)
        self.config = Config()
        locations = str(versions)
        if installed_by == "revisions":
            locations += "\nsqlalchemy_locks.alembic_templates:versions"
            if len(steps_.STEPS) > 1:
                (path / "later").mkdir(exist_ok=True)
                locations += f"\n{path / 'later'}"
            for before, step in zip(steps_.STEPS, steps_.STEPS[1:], strict=False):
                (path / "later" / f"{step}.py").write_text(_SHIPPED_REVISION.format(before=before, step=step))
            for name, value in options.items():
                self.config.set_main_option(f"sqlalchemy_locks_{name}", value.replace("%", "%%"))
        else:
            lowest = ("base", *steps_.STEPS[:-1]) if stepwise else ("base",)
            highest = steps_.STEPS if stepwise else steps_.STEPS[-1:]
            for from_, to in zip(lowest, highest, strict=True):
                (versions / f"a{to}_locks.py").write_text(revision(from_, to, **options))
        for name, value in {
            "script_location": str(path),
            "version_locations": locations,
            "path_separator": "newline",
            "sqlalchemy.url": url.render_as_string(hide_password=False),
        }.items():
            self.config.set_main_option(name, value.replace("%", "%%"))

    def at(self, step: str) -> str:
        """The name of a step's revision."""
        return step if step == "base" else f"{'a' if self.installed_by == 'directives' else 'sqlalchemy_locks_'}{step}"

    def upgrade(self, step: str | None = None) -> None:
        command.upgrade(self.config, self.at(step) if step else "heads")

    def downgrade(self, step: str = "base") -> None:
        command.downgrade(self.config, self.at(step))

    def script(self, direction: str = "upgrade") -> str:
        """The offline script."""
        self.config.output_buffer = io.StringIO()
        try:
            if direction == "upgrade":
                command.upgrade(self.config, "heads", sql=True)
            else:
                command.downgrade(self.config, f"{self.at(steps_.STEPS[-1])}:base", sql=True)
            return self.config.output_buffer.getvalue()
        finally:
            self.config.output_buffer = None


def statements(
    dialect: str,
    direction: str,
    steps: tuple[str, ...] | None = None,
    installed_by: steps_.InstalledBy = "directives",
    **options: Any,
) -> list[str]:
    """What steps write offline when they are run together, one command each, without Alembic's own."""
    buffer = io.StringIO()
    context = MigrationContext.configure(
        dialect_name=dialect, dialect_opts={"paramstyle": "named"}, opts={"as_sql": True, "output_buffer": buffer}
    )
    run = steps_.upgrade if direction == "upgrade" else steps_.downgrade
    run(Operations(context), steps or steps_.STEPS, Options(**options), installed_by)
    return [part + ";" for part in buffer.getvalue().split(";\n\n") if part.strip()]


@contextlib.contextmanager
def connected(url: URL) -> Iterator[Connection]:
    """A connection in AUTOCOMMIT, really closed afterwards."""
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection


def run(url: URL, *commands: str) -> Any:
    """Execute commands; the last one's rows."""
    with connected(url) as connection:
        for command in commands:
            result = connection.exec_driver_sql(command)
        return [tuple(row) for row in result] if result.returns_rows else []


def execute(url: URL, script: str) -> None:
    """Execute a script as psql, mysql and sqlite3 do: as text, to which the driver adds nothing."""
    dialect = url.get_dialect().name
    if dialect == "sqlite":
        with contextlib.closing(sqlite3.connect(str(url.database))) as connection:
            connection.executescript(script)
    elif dialect in ("mysql", "mariadb"):
        flag = pymysql.constants.CLIENT.MULTI_STATEMENTS
        raw: Any = pymysql.connect(
            host=url.host,
            port=int(url.port or 3306),
            user=url.username,
            password=str(url.password or ""),
            database=url.database,
            client_flag=flag,
            autocommit=True,
        )
        try:
            cursor = raw.cursor()
            cursor.execute(script)
            while cursor.nextset():
                pass
        finally:
            raw.close()
    else:
        with connected(url) as connected_:
            driver: Any = connected_.connection.dbapi_connection
            driver.cursor().execute(script)


def catalog(url: URL, schema: str = "lock") -> dict[str, Any]:
    """Every object of this library in the database, and the other objects that a wrong step could change."""
    with connected(url) as connection:
        if connection.dialect.name == "sqlite":
            return _sqlite(connection)
        if connection.dialect.name in ("mysql", "mariadb"):
            return _mysql(connection)
        return _postgresql(connection, schema)


def _sqlite(connection: Connection) -> dict[str, Any]:
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'alembic%' AND name NOT LIKE 'sqlite%'"
    )
    return {row.name: row.sql for row in rows}


def _mysql(connection: Connection) -> dict[str, Any]:
    names = [name for name in sa.inspect(connection).get_table_names() if not name.startswith("alembic")]
    shown = {name: connection.exec_driver_sql(f"SHOW CREATE TABLE `{name}`").one()[1] for name in names}
    # an INSERT IGNORE that is repeated uses up a number each time
    return {name: re.sub(r" AUTO_INCREMENT=\d+", "", definition) for name, definition in shown.items()}


def _postgresql(connection: Connection, schema: str) -> dict[str, Any]:
    queries = {
        "schema": "SELECT nspname, nspacl::text, obj_description(oid, 'pg_namespace') FROM pg_namespace"
        " WHERE nspname = :schema",
        "relations": "SELECT relname, relkind::text, relacl::text, CASE relkind WHEN 'v' THEN pg_get_viewdef(c.oid) END"
        " FROM pg_class c WHERE relnamespace = to_regnamespace(:name) ORDER BY 1",
        "columns": "SELECT table_name, column_name, data_type, is_nullable, column_default"
        " FROM information_schema.columns WHERE table_schema = :schema ORDER BY table_name, ordinal_position",
        "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE connamespace = to_regnamespace(:name) ORDER BY 1, 2",
        "indexes": "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = :schema ORDER BY 1, 2",
        "functions": "SELECT proname, pg_get_functiondef(oid), proacl::text FROM pg_proc"
        " WHERE pronamespace = to_regnamespace(:name) ORDER BY 1, 2",
    }
    given = {"schema": schema, "name": f'"{schema}"'}
    found = {what: [tuple(row) for row in connection.execute(sa.text(query), given)] for what, query in queries.items()}
    return {what: rows for what, rows in found.items() if rows}


def by_schema(url: URL) -> bool:
    """Whether the tables are in a schema of their own, and have no prefix."""
    return url.get_backend_name() in ("postgresql", "yugabytedb")


def table(url: URL, name: str) -> str:
    """A table's name in SQL."""
    return f"lock.{name}" if by_schema(url) else f"lock_{name}"


def drifts(url: URL, **place: str) -> list[str]:
    """What the drift check reports."""
    with connected(url) as connection:
        return check(connection, **place)


def synchronous(url: URL) -> URL:
    """The same database, by a driver that needs no event loop."""
    backend = url.get_backend_name()
    driver = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql", "sqlite": "pysqlite"}
    return url if backend == "yugabytedb" else url.set(drivername=f"{backend}+{driver[backend]}")


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text of a file, which is there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def installed(url: URL, schema: str = "lock", prefix: str = "lock_") -> list[tuple[str, str]]:
    """The steps that are recorded in the database, and what each was installed by."""
    place = f'"{schema}".' if by_schema(url) else prefix
    return run(url, f"SELECT step, installed_by FROM {place}installed ORDER BY step")

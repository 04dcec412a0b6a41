"""Find the database that a command works on, and connect to it with any SQLAlchemy driver, sync or async.

With an async driver the command runs unchanged in SQLAlchemy's greenlet. URLs and driver errors are shown without
passwords. Commands that an app has adopted use the app's own engine.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from sqlalchemy_locks.core.operation import translated_schema
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.connections import is_in_memory
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

T = TypeVar("T")

URL_VARIABLES = ("SQLALCHEMY_LOCKS_URL", "DATABASE_URL")
#: seconds that a server has to answer a connection attempt
CONNECT_TIMEOUT = 10
#: the modules of the drivers that are tried, in this order, for a URL that names none
_DRIVERS = {
    "postgresql": ("psycopg", "psycopg2", "asyncpg"),
    "mysql": ("pymysql", "mysqldb", "aiomysql", "asyncmy"),
    "mariadb": ("pymysql", "mysqldb", "aiomysql", "asyncmy"),
}
_MODULES = {"mysqldb": "MySQLdb"}
#: the extra that brings a driver, and of an engine the one that brings any
_EXTRAS = {
    "postgresql": "postgresql",
    "psycopg": "postgresql",
    "psycopg_async": "postgresql",
    "psycopg2": "psycopg2",
    "asyncpg": "asyncpg",
    "mysql": "mysql",
    "mariadb": "mysql",
    "pymysql": "mysql",
    "aiomysql": "aiomysql",
    "aiosqlite": "sqlite-async",
    "yugabytedb": "yugabytedb",
}
_SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^:/@\s]*:)[^@\s]*@")
_IN_DSN = re.compile(r"((?:password|passwd|pwd|passfile)['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,)]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Database:
    """The database that a command works on."""

    engine: Engine
    location: DatabaseUrl
    sleep: Callable[[float], None]
    #: how long the first connection took, in seconds
    connected_in: float = 0.0


@dataclass(frozen=True)
class DatabaseUrl:
    """The URL of a database, with the schema and prefix of the lock tables in it."""

    url: URL
    schema: str
    prefix: str

    @property
    def display(self) -> str:
        """The URL without its password, and without its options, which may contain secrets."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    def run(self, work: Callable[[Database], T]) -> T:
        """Call ``work`` with the connected database, and close all connections afterwards."""
        if self.url.get_dialect().is_async:
            return asyncio.run(self._run_in_greenlet(work))
        engine = create_engine(self.url, **self._engine_options())
        try:
            return work(Database(self._with_location(engine), self, time.sleep))
        finally:
            engine.dispose()

    async def _run_in_greenlet(self, work: Callable[[Database], T]) -> T:
        from sqlalchemy.ext.asyncio import create_async_engine
        from sqlalchemy.util import await_only, greenlet_spawn

        def sleep(seconds: float) -> None:
            await_only(asyncio.sleep(seconds))

        engine = create_async_engine(self.url)
        try:
            return await greenlet_spawn(work, Database(self._with_location(engine.sync_engine), self, sleep))
        finally:
            await engine.dispose()

    def _engine_options(self) -> dict[str, Any]:
        if self._is_file or "connect_timeout" in self.url.query:
            return {}
        return {"connect_args": {"connect_timeout": CONNECT_TIMEOUT}}

    def _with_location(self, engine: Engine) -> Engine:
        options: dict[str, Any] = {}
        if self.schema != DEFAULT_SCHEMA:
            options["schema_translate_map"] = {DEFAULT_SCHEMA: self.schema}
        if self.prefix != DEFAULT_PREFIX:
            options["locks_prefix"] = self.prefix
        return engine.execution_options(**options) if options else engine

    @property
    def _is_file(self) -> bool:
        return backend_for(self.url.get_dialect()()).single_writer

    def exists(self) -> bool:
        """Return whether there is a database to connect to, as far as is known without connecting.

        Connecting to a SQLite file that doesn't exist would create it.
        """
        name = self.url.database
        if not self._is_file or not name or name.startswith("file:"):
            return True
        return Path(name).exists()

    def redact(self, text: str) -> str:
        """Return an error message or a traceback without the secrets of the URL."""
        text = _IN_DSN.sub(r"\1***", _IN_URL.sub(r"\1***@", text))
        secrets = [str(value) for name, value in self.url.query.items() if _SECRET.search(name)]
        if self.url.password:
            quoted = self.url.render_as_string(hide_password=False)
            secrets += [str(self.url.password), *re.findall(r"://[^:]*:(.*)@", quoted)]
        # a password equal to the user's name, the host or the database can't be told from them in the text
        public = {self.url.username, self.url.host, self.url.database}
        for secret in sorted((each for each in secrets if len(each) > 3 and each not in public), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class AppDatabaseUrl(DatabaseUrl):
    """The database of an app, reached through the app's own engine, whose pool is left open."""

    engine: Engine

    @classmethod
    def of(cls, engine: Engine) -> AppDatabaseUrl:
        """Read the schema and the prefix from the engine's execution options."""
        options = engine.get_execution_options()
        schema = translated_schema(options, DEFAULT_SCHEMA)
        return cls(engine.url, schema, options.get("locks_prefix", DEFAULT_PREFIX), engine)

    def run(self, work: Callable[[Database], T]) -> T:
        """Call ``work`` with the app's engine."""
        return work(Database(self.engine, self, time.sleep))


@dataclass(frozen=True)
class HostApp:
    """The app that has adopted the commands: the object of Click's context."""

    #: what is typed before a command's name, e.g. ``flask locks``
    program: str
    engine: Callable[[], Engine]
    #: makes the context in which the app's code runs, such as the handlers of a worker
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def find_database(url: str | None, config: str | None, schema: str | None, prefix: str | None) -> DatabaseUrl:
    """Return the database that the options, the environment or Alembic's configuration name.

    :raises click.UsageError: when none of them does, or the URL can't be used.
    """
    if url and config:
        raise click.UsageError("--url and --config both name a database: give one of them.")
    configured: dict[str, str] = {}
    if config:
        url, configured = _read_config(config)
    elif not url:
        url = next(filter(None, map(os.environ.get, URL_VARIABLES)), None)
        if url is None:
            raise click.UsageError(
                f"Which database? Give --url, or --config with an alembic.ini, or set {' or '.join(URL_VARIABLES)}."
            )
    parsed = _parse_url(url)
    backend = backend_for(parsed.get_dialect()())
    # a script for several engines gives both
    if schema and not prefix and not backend.schemas:
        raise click.UsageError(f"{backend.name}'s tables are in no schema of their own: give their --prefix.")
    if prefix and not schema and backend.schemas:
        raise click.UsageError(f"{backend.name}'s tables have no prefix, but a schema of their own: give its --schema.")
    return DatabaseUrl(
        parsed,
        schema or configured.get("schema", DEFAULT_SCHEMA),
        prefix or configured.get("prefix", DEFAULT_PREFIX),
    )


def _read_config(path: str) -> tuple[str, dict[str, str]]:
    from alembic.config import Config
    from alembic.util import CommandError

    from sqlalchemy_locks.alembic.options import Options

    config = Config(path)
    try:
        url = config.get_main_option("sqlalchemy.url")
    except (configparser.Error, CommandError, ValueError, OSError) as error:
        # the error's own text is left out: it may contain the password
        why = "it is no configuration with a section [alembic]"
        if isinstance(error, configparser.InterpolationError):
            why = "in its sqlalchemy.url a percent sign is written %%, and %(name)s stands for another option of it"
        raise click.UsageError(f"{path} can't be read: {why}.") from None
    if not url:
        raise click.UsageError(f"{path} has no sqlalchemy.url: give --url, or set {URL_VARIABLES[0]}.")
    options = Options.from_config(config)
    return url, {"schema": options.schema, "prefix": options.prefix}


def _parse_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # the URL itself is left out: it may contain a password
        raise click.UsageError(
            "The URL can't be read: it looks like postgresql+psycopg://user:password@host/database or sqlite:///app.db."
        ) from None
    name = "postgresql" if url.drivername == "postgres" else url.drivername
    if name in _DRIVERS:
        installed = [driver for driver in _DRIVERS[name] if find_spec(_MODULES.get(driver) or driver)]
        if not installed:
            raise click.UsageError(_no_driver(name))
        name = f"{name}+{installed[0]}"
    url = url.set(drivername=name)
    try:
        backend = backend_for(url.get_dialect()())
        url.get_dialect().import_dbapi()
    except Unsupported as error:
        raise click.UsageError(str(error)) from None
    except NoSuchModuleError:
        raise click.UsageError(f"SQLAlchemy knows no dialect {url.drivername!r}.") from None
    except ImportError:
        raise click.UsageError(_no_driver(url.drivername)) from None
    if not backend.single_writer and "@" in f"{url.host}{url.database}":
        # an unquoted @ or / in the password: the rest of the password was parsed as the host, or as the database
        raise click.UsageError("The URL can't be read: in a user's name or a password, @ is written %40, and / %2F.")
    if backend.single_writer and is_in_memory(url):
        raise click.UsageError("A database in memory ends with this command: name a file, as in sqlite:///app.db.")
    # a server without schemas has the tables in the database that the URL names
    if not backend.schemas and not backend.single_writer and not url.database:
        raise click.UsageError(f"The URL names no database of {backend.name}: put it after the host, as in host/app.")
    return url


def _no_driver(name: str) -> str:
    engine, _, driver = name.partition("+")
    extra = _EXTRAS.get(driver or engine)
    how = f"no extra brings {driver}; install it by itself, or take another"
    if extra is not None:
        how = f"pip install 'sqlalchemy-locks[cli,{extra}]' brings {'it' if driver else 'one'}"
    return f"No driver is installed for {name}:// URLs: {how}."

"""Which database is meant, and how it is reached: any driver that SQLAlchemy has, sync or async.

An async driver is awaited in SQLAlchemy's greenlet, in which every command runs as it is. What is said of a URL, or of
an error, never has a password in it. An app that has the same commands gives them the engine that it has already.
"""

from __future__ import annotations

import asyncio
import configparser
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

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

T = TypeVar("T")

VARIABLES = ("SQLALCHEMY_LOCKS_URL", "DATABASE_URL")
#: how long a server is given to answer a connection, in seconds
PATIENCE = 10
#: what is looked for when a URL names no driver: its module
_DRIVERS = {
    "postgresql": ("psycopg", "psycopg2", "asyncpg"),
    "mysql": ("pymysql", "mysqldb", "aiomysql", "asyncmy"),
    "mariadb": ("pymysql", "mysqldb", "aiomysql", "asyncmy"),
}
_MODULES = {"mysqldb": "MySQLdb"}
_SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^:/@\s]*:)[^@\s]*@")
_IN_DSN = re.compile(r"((?:password|passwd|pwd|passfile)['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,)]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Database:
    """What a command works on."""

    engine: Engine
    target: DatabaseUrl
    sleep: Callable[[float], None]
    #: in so many seconds
    connected_in: float = 0.0


@dataclass(frozen=True)
class DatabaseUrl:
    """A database that was named, with where the locks are in it."""

    url: URL
    schema: str
    prefix: str

    @property
    def shown(self) -> str:
        """The URL for people: no password, and none of the options, where others hide."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    def run(self, work: Callable[[Database], T]) -> T:
        """Do something there, and leave no connection open."""
        if self.url.get_dialect().is_async:
            return asyncio.run(self._awaited(work))
        engine = create_engine(self.url, **self._options())
        try:
            return work(Database(self.placed(engine), self, time.sleep))
        finally:
            engine.dispose()

    async def _awaited(self, work: Callable[[Database], T]) -> T:
        from sqlalchemy.ext.asyncio import create_async_engine
        from sqlalchemy.util import await_only, greenlet_spawn

        def sleep(seconds: float) -> None:
            await_only(asyncio.sleep(seconds))

        engine = create_async_engine(self.url)
        try:
            return await greenlet_spawn(work, Database(self.placed(engine.sync_engine), self, sleep))
        finally:
            await engine.dispose()

    def _options(self) -> dict[str, Any]:
        file = backend_for(self.url.get_dialect()()).locking == "file"
        if file or "connect_timeout" in self.url.query:
            return {}
        return {"connect_args": {"connect_timeout": PATIENCE}}

    def placed(self, engine: Engine) -> Engine:
        """An engine that looks for the locks where they are."""
        options: dict[str, Any] = {}
        if self.schema != DEFAULT_SCHEMA:
            options["schema_translate_map"] = {DEFAULT_SCHEMA: self.schema}
        if self.prefix != DEFAULT_PREFIX:
            options["locks_prefix"] = self.prefix
        return engine.execution_options(**options) if options else engine

    def exists(self) -> bool:
        """Whether there is something to connect to, as far as one can see without: SQLite makes what isn't there."""
        name = self.url.database
        if backend_for(self.url.get_dialect()()).locking != "file" or not name or name.startswith("file:"):
            return True
        return name == ":memory:" or Path(name).exists()

    def scrubbed(self, text: str) -> str:
        """What a driver, or a traceback, says, without the secrets of the URL."""
        text = _IN_DSN.sub(r"\1***", _IN_URL.sub(r"\1***@", text))
        given = [str(value) for name, value in self.url.query.items() if _SECRET.search(name)]
        if self.url.password:
            quoted = self.url.render_as_string(hide_password=False)
            given += [str(self.url.password), *re.findall(r"://[^:]*:(.*)@", quoted)]
        # one that is the same as the user's name is no news where that name is told
        known = {self.url.username, self.url.host, self.url.database}
        for secret in sorted((each for each in given if len(each) > 3 and each not in known), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class AppTarget(DatabaseUrl):
    """The database of an app, by the engine that the app has; its pool is left as it is."""

    engine: Engine

    @classmethod
    def of(cls, engine: Engine) -> AppTarget:
        """With the locks where the engine's own options say that they are."""
        options = engine.get_execution_options()
        schema = options.get("schema_translate_map", {}).get(DEFAULT_SCHEMA, DEFAULT_SCHEMA)
        return cls(engine.url, schema, options.get("locks_prefix", DEFAULT_PREFIX), engine)

    def run(self, work: Callable[[Database], T]) -> T:
        """Do something there."""
        return work(Database(self.engine, self, time.sleep))


@dataclass(frozen=True)
class App:
    """Whose commands they are, where they are an app's: the object of Click's context."""

    #: what is typed before a command's name
    program: str
    engine: Callable[[], Engine]


def target(url: str | None, config: str | None, schema: str | None, prefix: str | None) -> DatabaseUrl:
    """The database that the options, the environment or Alembic's configuration name.

    :raises click.UsageError: when none does, or what does so can't be used.
    """
    if url and config:
        raise click.UsageError("--url and --config both name a database: give one of them.")
    placed: dict[str, str] = {}
    if config:
        url, placed = _configured(config)
    elif not url:
        url = next(filter(None, map(os.environ.get, VARIABLES)), None)
        if url is None:
            raise click.UsageError(
                f"Which database? Give --url, or --config with an alembic.ini, or set {' or '.join(VARIABLES)}."
            )
    return DatabaseUrl(
        _usable(url),
        schema or placed.get("schema", DEFAULT_SCHEMA),
        prefix or placed.get("prefix", DEFAULT_PREFIX),
    )


def _configured(path: str) -> tuple[str, dict[str, str]]:
    from alembic.config import Config
    from alembic.util import CommandError

    from sqlalchemy_locks.alembic.options import Options

    config = Config(path)
    try:
        url = config.get_main_option("sqlalchemy.url")
    except (configparser.Error, CommandError, ValueError, OSError) as error:
        # not told what it says: there is a password in it
        why = "it is no configuration with a section [alembic]"
        if isinstance(error, configparser.InterpolationError):
            why = "in its sqlalchemy.url a percent sign is written %%, and %(name)s stands for another option of it"
        raise click.UsageError(f"{path} can't be read: {why}.") from None
    if not url:
        raise click.UsageError(f"{path} has no sqlalchemy.url: give --url, or set {VARIABLES[0]}.")
    options = Options.configured(config)
    return url, {"schema": options.schema, "prefix": options.prefix}


def _usable(given: str) -> URL:
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        # not told what it was: there may be a password in it
        raise click.UsageError(
            "The URL can't be read: it looks like postgresql+psycopg://user:password@host/database or sqlite:///app.db."
        ) from None
    if url.host and "@" in url.host:
        # what is taken for the host begins in the midst of a password
        raise click.UsageError("The URL can't be read: in a user's name or a password, an @ is written %40.")
    name = "postgresql" if url.drivername == "postgres" else url.drivername
    if name in _DRIVERS:
        there = [driver for driver in _DRIVERS[name] if find_spec(_MODULES.get(driver) or driver)]
        if not there:
            raise click.UsageError(_no_driver(name))
        name = f"{name}+{there[0]}"
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
    if backend.locking == "rows" and not url.database:
        raise click.UsageError(f"The URL names no database of {backend.name}: put it behind the host, as in host/app.")
    return url


def _no_driver(name: str) -> str:
    return (
        f"No driver is installed for {name}:// URLs: pip install 'sqlalchemy-locks[postgresql]' (or [mysql], "
        "[psycopg2], [asyncpg], ...) brings one."
    )

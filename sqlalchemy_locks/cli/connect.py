"""Find the database that a command works on, and connect to it with any SQLAlchemy driver, sync or async.

With an async driver the command runs unchanged in SQLAlchemy's greenlet. Passwords are never shown.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

T = TypeVar("T")

URL_VARIABLES = ("SQLALCHEMY_LOCKS_URL", "DATABASE_URL")


@dataclass(frozen=True)
class Database:
    """The database that a command works on, with the schema and prefix of the lock tables in it."""

    engine: Engine
    schema: str = DEFAULT_SCHEMA
    prefix: str = DEFAULT_PREFIX

    @property
    def display(self) -> str:
        """The URL without its password, and without its options, which may contain secrets."""
        return self.engine.url.set(query={}).render_as_string(hide_password=True)

    @property
    def is_absent(self) -> bool:
        """Whether it is a SQLite file that doesn't exist, which a connection would create."""
        name = self.engine.url.database or ":memory:"
        is_file = backend_for(self.engine.dialect).single_writer and not name.startswith("file:")
        return is_file and not Path(name).exists()

    def run(self, work: Callable[[], T]) -> T:
        """Call a function that uses the engine, and close all connections afterwards."""

        def run() -> T:
            try:
                return work()
            finally:
                self.engine.dispose()

        return asyncio.run(greenlet_spawn(run)) if self.engine.dialect.is_async else run()

    def redact(self, text: str) -> str:
        """Return an error message or a traceback without the password of the URL."""
        password = self.engine.url.password
        return text.replace(str(password), "***") if password else text


def find_database(url: str | None, config: str | None, schema: str | None, prefix: str | None) -> Database:
    """Return the database that the options, the environment or Alembic's configuration name.

    :raises click.UsageError: when none of them does, or the URL can't be used.
    """
    if url and config:
        raise click.UsageError("--url and --config both name a database: give one of them.")
    configured_schema, configured_prefix = DEFAULT_SCHEMA, DEFAULT_PREFIX
    if config:
        url, configured_schema, configured_prefix = _read_config(config)
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
    return Database(_make_engine(parsed), schema or configured_schema, prefix or configured_prefix)


def _read_config(path: str) -> tuple[str, str, str]:
    from alembic.config import Config

    from sqlalchemy_locks.alembic.options import Options

    config = Config(path)
    try:
        url = config.get_main_option("sqlalchemy.url")
    except Exception as error:
        # the error's own text is left out: it may contain the password
        raise click.UsageError(f"{path} can't be read: {type(error).__name__}; write each % in it as %%.") from None
    if not url:
        raise click.UsageError(f"{path} has no sqlalchemy.url: give --url, or set {URL_VARIABLES[0]}.")
    options = Options.from_config(config)
    return url, options.schema, options.prefix


def _parse_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # the URL itself is left out: it may contain a password
        raise click.UsageError(
            "The URL can't be read: it looks like postgresql+psycopg://user:password@host/database or sqlite:///app.db."
        ) from None
    if "@" in f"{url.host}{url.database}":
        # the rest of a password that was parsed as the host, or as the database
        raise click.UsageError("The URL can't be read: in a user's name or a password, write @ as %40, and / as %2F.")
    try:
        backend_for(url.get_dialect()())
        url.get_dialect().import_dbapi()
    except Unsupported as error:
        raise click.UsageError(str(error)) from None
    except NoSuchModuleError:
        raise click.UsageError(
            f"SQLAlchemy knows no dialect {url.drivername!r}: it is named as in postgresql+psycopg:// or sqlite://."
        ) from None
    except ImportError as error:
        raise click.UsageError(
            f"The driver of {url.drivername}:// URLs is not installed ({error}): install it (this library has extras "
            "such as [postgresql] and [mysql]), or name another one in the URL."
        ) from None
    return url


def _make_engine(url: URL) -> Engine:
    if url.get_dialect().is_async:
        from sqlalchemy.ext.asyncio import create_async_engine

        # no pool: the page has an event loop of its own, and a pooled connection would belong to this one
        return create_async_engine(url, poolclass=NullPool).sync_engine
    return create_engine(url)

"""The demo's database: a file in a temporary folder, or one of its own on the server that a URL names."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, NullPool, String, create_engine, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DATABASE = f"sqlalchemy_locks_demo_{os.getpid()}"

#: the drivers that `make demo` installs, for URLs that name none
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
NAMES = {
    "sqlite": "SQLite",
    "postgresql": "PostgreSQL",
    "yugabytedb": "YugabyteDB",
    "mysql": "MySQL",
    "mariadb": "MariaDB",
}


class Base(DeclarativeBase):
    """The demo's models."""


class Invoice(Base):
    """A row to change under a lock: adding a position reads the count, and writes one more."""

    __tablename__ = "invoice"
    name: Mapped[str] = mapped_column(String(20), primary_key=True)
    positions: Mapped[int]


@contextlib.contextmanager
def new_database(server: str | None) -> Iterator[URL]:
    """Create a database, and drop it when the block ends."""
    if server is None:
        with tempfile.TemporaryDirectory(prefix="sqlalchemy-locks-demo-") as folder:
            yield make_url(f"sqlite:///{Path(folder) / 'demo.db'}")
        return
    url = make_url(server)
    url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
    if url.get_dialect().is_async:
        raise SystemExit(f"The demo's workers are synchronous, and {url.drivername} is not: name another driver.")
    if url.get_backend_name() == "sqlite":
        raise SystemExit("On SQLite the demo creates its own database: leave the URL out.")
    administrator = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    try:
        with administrator.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {DATABASE}")
    except DBAPIError as error:
        raise SystemExit(f"No database could be created at {url}: {error.orig}") from None
    try:
        yield url.set(database=DATABASE)
    finally:
        with administrator.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {DATABASE}")


def engine_name(url: URL) -> str:
    """Return the name of the engine."""
    with create_engine(url, poolclass=NullPool).connect() as connection:
        dialect: Any = connection.dialect
        if dialect.name == "postgresql" and "-YB-" in str(connection.exec_driver_sql("SELECT version()").scalar()):
            return "YugabyteDB"
        return NAMES["mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name]


def upgrade(url: URL) -> None:
    """Run ``alembic upgrade heads``: the app's own revisions, and those of the locks."""
    config = Config(Path(__file__).with_name("alembic.ini"))
    config.set_main_option("sqlalchemy.url", url.render_as_string(hide_password=False).replace("%", "%%"))
    command.upgrade(config, "heads")

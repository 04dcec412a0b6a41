"""The common part of all SQL servers, which are accessed through SQLAlchemy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import create_engine
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool

from tests.servers import cache
from tests.servers.base import Server
from tests.servers.process import run


class SQLServer(Server):
    """A server with an administrator `locks`, whose first database is `locks`."""

    #: The scheme of each driver's URLs.
    drivers: ClassVar[Mapping[str, str]]
    #: The driver with which the test suite manages the server.
    own_driver: ClassVar[str]
    #: A database that always exists.
    first_database: str
    user = "locks"
    password = "locks"
    database = "locks"

    def url(self, driver: str, database: str | None = None) -> str:
        """The URL at which the driver named reaches the server."""
        if driver not in self.drivers:
            known = ", ".join(self.drivers)
            raise ValueError(f"{self.kind} has no driver {driver!r}, but {known}")
        return URL.create(
            self.drivers[driver],
            username=self.user,
            password=self.password,
            host=self.host,
            port=self.port,
            database=self.database if database is None else database,
        ).render_as_string(hide_password=False)

    def execute(self, *statements: str, database: str | None = None) -> Any:
        """Execute statements outside of a transaction; return the first value of the last one."""
        engine = create_engine(
            self.url(self.own_driver, database),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"connect_timeout": 60},
        )
        value: Any = None
        with engine.connect() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
                value = result.scalar() if result.returns_rows else None
        return value

    def create_database(self, name: str) -> None:
        """Create a database."""
        self.execute(f"CREATE DATABASE {self._quoted(name)}", database=self.first_database)

    def drop_database(self, name: str) -> None:
        """Drop a database, if it is there."""
        self.execute(f"DROP DATABASE IF EXISTS {self._quoted(name)}", database=self.first_database)

    def _quoted(self, name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    def _copy(self, key: str, initialize: Callable[[Path], None]) -> None:
        """Initialising takes seconds; a sparse copy of initialised data takes less."""
        template = cache.prepared(key, initialize)
        run("cp", "-a", "--sparse=always", template / "data", self.data, directory=self.directory)

    def _ping(self) -> None:
        self.execute("SELECT 1", database=self.first_database)

"""YugabyteDB's stand-in, and the way to a real cluster.

The stand-in is a PostgreSQL 15 that answers `version()` as YugabyteDB does, knows its
settings and has the function `yb_get_effective_transaction_isolation_level()`. It proves
that every statement and function body for YugabyteDB is accepted and runs; it proves
nothing about YugabyteDB's storage.

A database of it is one before 2025.1, without advisory locks, unless it has `ADVISORY`.
With `stand_in.failures` and `stand_in.seed`, statements and COMMITs fail by chance, as
those of YugabyteDB do.

For that, set the environment variable YUGABYTE_URL to the URL of a real cluster, whose
user may create databases: `postgresql://yugabyte:yugabyte@127.0.0.1:5433/yugabyte`.
"""

import hashlib
import os
from pathlib import Path

from sqlalchemy.engine import make_url

from tests.servers import cache
from tests.servers.postgresql import PostgreSQL, programs
from tests.servers.process import Unavailable, own, program, run
from tests.servers.sql import SQLServer

SOURCE = Path(__file__).with_name("yugabytedb.c")
HEADERS = Path("/usr/include/postgresql/15/server")

#: By the name of each driver: YugabyteDB's own dialect, and PostgreSQL's.
DRIVERS = {**PostgreSQL.drivers, "yugabytedb": "yugabytedb", "yugabytedb+psycopg2": "yugabytedb+psycopg2"}

#: The settings of a database that answers as YugabyteDB 2025.2 does.
ADVISORY = {
    "stand_in.version": "15.12-YB-2025.2.3.2-b1",
    "yb_enable_advisory_locks": "on",
    "yb_enable_listen_notify": "on",
}

#: PostgreSQL's own version() is renamed, because it can be neither dropped nor replaced: by
#: its OID it is the one that is compiled in, whatever the catalog says.
STATEMENTS = (
    "ALTER FUNCTION pg_catalog.version() RENAME TO postgresql_version",
    (
        "CREATE FUNCTION pg_catalog.version() RETURNS text "
        "LANGUAGE C STABLE STRICT PARALLEL SAFE AS '{library}', 'stand_in_version'"
    ),
    (
        "CREATE FUNCTION pg_catalog.yb_get_effective_transaction_isolation_level() "
        "RETURNS text LANGUAGE SQL STABLE "
        "AS 'SELECT current_setting(''transaction_isolation'')'"
    ),
)


def _library() -> Path:
    """The extension, built against the headers of the server that loads it."""
    version = run(programs(15) / "postgres", "--version", directory=Path("/"))
    compiler = program(
        "gcc",
        "/usr/bin:/usr/local/bin",
        "YugabyteDB's stand-in cannot be built: there is no C compiler; "
        "the Debian packages gcc and libc6-dev bring it.",
    )
    if not (HEADERS / "postgres.h").is_file():
        raise Unavailable(
            f"YugabyteDB's stand-in cannot be built: PostgreSQL's headers are not in "
            f"{HEADERS}; the Debian package postgresql-server-dev-15 brings them."
        )
    content = SOURCE.read_bytes()

    def build(folder: Path) -> None:
        own(folder)
        source = folder / SOURCE.name  # The checkout may be closed to the account.
        source.write_bytes(content)
        source.chmod(0o644)
        options = ("-O1", "-shared", "-fPIC", f"-I{HEADERS}", "-o", "yugabytedb.so")
        run(compiler, *options, source, directory=folder)

    digest = hashlib.sha256(content + version.encode()).hexdigest()[:16]
    return cache.prepared(f"yugabytedb-{digest}", build) / "yugabytedb.so"


class YugabyteDB(PostgreSQL):
    """The stand-in."""

    kind = "yugabytedb"
    drivers = DRIVERS

    def __init__(self) -> None:
        super().__init__()
        self.name = self.kind
        self.tls = False  # psycopg2 is tested without TLS, too

    def configure(self, database: str, **settings: str) -> None:
        """Set what a database answers to new connections: `ADVISORY`, or others of its settings."""
        name = self._quoted(database)
        self.execute(*(f"ALTER DATABASE {name} SET {what} = '{value}'" for what, value in settings.items()))

    def standby(self) -> PostgreSQL:
        """YugabyteDB has no such standby."""
        raise NotImplementedError("YugabyteDB has no physical standby")

    def _prepare(self) -> None:
        self._library = _library()
        self.settings = {
            **self.settings,
            "shared_preload_libraries": f'"{self._library}"',
            "allow_system_table_mods": "on",
        }
        super()._prepare()

    def _provision(self) -> None:
        statements = [text.format(library=self._library) for text in STATEMENTS]
        for database in ("template1", self.first_database):
            self.execute(*statements, database=database)
        super()._provision()


class YugabyteDBCluster(SQLServer):
    """A real cluster at YUGABYTE_URL: used, but neither started nor stopped."""

    kind = "yugabytedb"
    drivers = DRIVERS
    own_driver = "psycopg2"

    def __init__(self, url: str) -> None:
        super().__init__(self.kind)
        self._url = make_url(url)
        self.host = self._url.host or "127.0.0.1"
        self.port = self._url.port or 5433
        self.first_database = self.database = self._url.database or "yugabyte"

    def url(self, driver: str, database: str | None = None) -> str:
        """The URL at which the driver named reaches the cluster."""
        super().url(driver)  # Refuses unknown drivers.
        url = self._url.set(drivername=self.drivers[driver], database=database or self.database)
        return url.render_as_string(hide_password=False)

    def start(self) -> "YugabyteDBCluster":
        """Check that the cluster answers."""
        self._ping()
        return self

    def stop(self) -> None:
        """Leave the cluster as it is."""

    def kill(self) -> None:
        """Refuse, because the cluster doesn't belong to the test suite."""
        raise Unavailable("The cluster at YUGABYTE_URL is not the suite's to disturb.")

    restart = pause = resume = kill


def cluster_or_stand_in() -> SQLServer:
    """The cluster at YUGABYTE_URL if that is set, otherwise the stand-in."""
    url = os.environ.get("YUGABYTE_URL")
    return YugabyteDBCluster(url) if url else YugabyteDB()

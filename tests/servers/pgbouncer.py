"""PgBouncer as Debian packages it: in front of a PostgreSQL server of the suite, in transaction mode.

The one that is installed, of Debian 12 say, is 1.18; the first to keep track of prepared statements is 1.21.
"""

from pathlib import Path

from tests.servers.debian import loaded, unpacked
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import own, program

SETTINGS = {
    "pool_mode": "transaction",
    # every client connects as the only user
    "auth_type": "any",
    "max_client_conn": "1000",
    "default_pool_size": "20",
    # the tests' own timeouts end a wait for a server connection, not PgBouncer's
    "query_wait_timeout": "0",
    "server_idle_timeout": "0",
}


class PgBouncer(PostgreSQL):
    """A pooler: databases, users and drivers are those of the server behind it.

    :param release: the Debian release that it is of, instead of the one that is installed: ``"trixie"`` has 1.24.
    """

    kind = "pgbouncer"

    def __init__(self, behind: PostgreSQL, release: str | None = None, **settings: str | int) -> None:
        super().__init__(behind.version)
        self.release = release
        self.name = self.kind
        self.behind = behind
        self.settings = {**SETTINGS, **{name: str(value) for name, value in settings.items()}}

    def create_database(self, name: str) -> None:
        """Create a database on the server behind it."""
        self.behind.create_database(name)

    def drop_database(self, *names: str) -> None:
        """Drop databases on the server behind it."""
        self.behind.drop_database(*names)

    def _prepare(self) -> None:
        if self.release is not None:
            self._program = loaded(unpacked("pgbouncer", self.release), "usr/sbin/pgbouncer")
        else:
            missing = (
                "PgBouncer is not installed: the program pgbouncer is missing; the Debian package pgbouncer brings it."
            )
            self._program = [program("pgbouncer", "/usr/sbin:/usr/bin:/usr/local/bin", missing)]
        settings = {**self.settings, "listen_addr": self.host, "listen_port": str(self.port), "unix_socket_dir": ""}
        lines = [
            "[databases]",
            f"* = host={self.behind.host} port={self.behind.port} user={self.user}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in settings.items()),
        ]
        self._configuration = self.directory / "pgbouncer.ini"
        self._configuration.write_text("\n".join(lines) + "\n")
        own(self._configuration)

    def _command(self) -> list[str | Path]:
        return [*self._program, self._configuration]

    def _provision(self) -> None:
        """The databases are the other server's."""

    def _discard(self) -> None:
        """It leaves nothing outside of its folder."""

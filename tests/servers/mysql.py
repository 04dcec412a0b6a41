"""MySQL, which Debian has in its unstable release only, and what MariaDB shares."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.servers.debian import loaded, unpacked
from tests.servers.process import own, run
from tests.servers.sql import SQLServer
from tests.servers.tls import certificate

#: Run by the server at each start, before it lets clients in.
ACCOUNT = """\
CREATE DATABASE IF NOT EXISTS {database};
CREATE USER IF NOT EXISTS '{user}'@'%' IDENTIFIED BY '{password}';
GRANT ALL PRIVILEGES ON *.* TO '{user}'@'%' WITH GRANT OPTION;
"""


class MySQLCompatible(SQLServer):
    """A server that speaks MySQL's protocol."""

    own_driver = "pymysql"
    first_database = "mysql"
    #: flush the log at each commit (1), or once a second (2)
    flush = 2

    def __init__(self, *options: str) -> None:
        super().__init__(self.kind)
        self._more = options

    def _quoted(self, name: str) -> str:
        return "`" + name.replace("`", "``") + "`"

    def _prepare(self) -> None:
        account = self.directory / "account.sql"
        account.write_text(ACCOUNT.format(database=self.database, user=self.user, password=self.password))
        own(account)

    def _options(self) -> list[str]:
        """The options that mean the same to both servers."""
        return [
            f"--datadir={self.data}",
            f"--bind-address={self.host}",
            f"--port={self.port}",
            f"--socket={self.directory}/socket",
            f"--pid-file={self.directory}/pid",
            f"--tmpdir={self.directory}",
            f"--init-file={self.directory}/account.sql",
            "--character-set-server=utf8mb4",
            f"--innodb-flush-log-at-trx-commit={self.flush}",
            "--innodb-buffer-pool-size=128M",
            "--max-connections=300",
            # a machine may be paused for as long as the default of 50 seconds
            "--innodb-lock-wait-timeout=240",
            "--skip-log-bin",
            "--skip-name-resolve",
            *self._more,
        ]


def _mysqld() -> list[str | Path]:
    """How to run the server."""
    root = unpacked("mysql-server-core", "unstable")
    return [
        *loaded(root, "usr/sbin/mysqld"),
        "--no-defaults",
        f"--basedir={root}/usr",
        f"--lc-messages-dir={root}/usr/share/mysql",
        f"--character-sets-dir={root}/usr/share/mysql/charsets",
        f"--plugin-dir={root}/usr/lib/mysql/plugin",
        "--mysqlx=OFF",
        "--secure-file-priv=",
    ]


class MySQL(MySQLCompatible):
    """A MySQL server."""

    kind = "mysql"
    drivers: ClassVar[Mapping[str, str]] = {
        "pymysql": "mysql+pymysql",
        "aiomysql": "mysql+aiomysql",
        "asyncmy": "mysql+asyncmy",
    }

    def _prepare(self) -> None:
        super()._prepare()
        self._program = _mysqld()
        version = run(*self._program, "--version", directory=self.directory).split()

        def initialize(folder: Path) -> None:
            own(folder)
            data = f"--datadir={folder}/data"
            run(*self._program, "--initialize-insecure", data, directory=folder)
            (folder / "data/auto.cnf").unlink()  # The server's identity: each copy needs its own.

        self._copy(f"mysql-data-{version[2]}", initialize)

    def _command(self) -> list[str | Path]:
        # its own would be RSA's, which takes a millisecond longer at each connection
        folder = certificate()
        tls = (f"--ssl-cert={folder}/server.crt", f"--ssl-key={folder}/server.key")
        return [*self._program, *self._options(), *tls]

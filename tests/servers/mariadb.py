"""MariaDB as Debian packages it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.servers.mysql import MySQLCompatible
from tests.servers.process import own, program, run

FOLDERS = "/usr/sbin:/usr/bin"
MISSING = (
    "MariaDB is not installed: the program {0} is not in /usr/sbin or /usr/bin; "
    "the Debian packages mariadb-server-core and mariadb-client-core bring it."
)


class MariaDB(MySQLCompatible):
    """A MariaDB server."""

    kind = "mariadb"
    drivers: ClassVar[Mapping[str, str]] = {
        **{name: f"mysql+{name}" for name in ("pymysql", "aiomysql", "asyncmy")},
        **{f"mariadb+{name}": f"mariadb+{name}" for name in ("pymysql", "aiomysql", "asyncmy")},
    }

    def _prepare(self) -> None:
        super()._prepare()
        self._program, install, *_ = (
            program(name, FOLDERS, MISSING.format(name))
            for name in ("mariadbd", "mariadb-install-db", "my_print_defaults")
        )
        version = run(self._program, "--no-defaults", "--version", directory=self.directory).split()

        def initialize(folder: Path) -> None:
            own(folder)
            options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
            run(install, "--no-defaults", *options, f"--datadir={folder}/data", directory=folder)

        self._copy(f"mariadb-data-{version[2]}", initialize)

    def _command(self) -> list[str | Path]:
        # such as --innodb-snapshot-isolation=ON, the default of later versions
        more = os.environ.get("MARIADB_OPTIONS", "").split()
        return [self._program, "--no-defaults", *self._options(), *more]

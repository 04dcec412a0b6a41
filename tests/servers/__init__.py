"""Real servers for the tests, started by the tests.

    from tests import servers

    server = servers.start("postgresql15")  # or raises servers.Unavailable
    engine = create_engine(server.url("psycopg"))

Each `start()` gives a new server with a folder, a port and an administrator of its own.
It ends with the process that started it, however that ends.
"""

from collections.abc import Callable, Sequence

from tests.servers.base import Server, StartFailed, Unavailable, stop_all
from tests.servers.galera import GaleraNode, galera
from tests.servers.group_replication import GroupMember, group_replication
from tests.servers.mariadb import MariaDB
from tests.servers.mysql import MySQL
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgresql import PostgreSQL
from tests.servers.redis import Redis
from tests.servers.sql import SQLServer
from tests.servers.yugabytedb import YugabyteDB, YugabyteDBCluster, cluster_or_stand_in

__all__ = [
    "CLUSTERS",
    "NAMES",
    "MariaDB",
    "MySQL",
    "Node",
    "PgBouncer",
    "PostgreSQL",
    "Redis",
    "SQLServer",
    "Server",
    "StartFailed",
    "Unavailable",
    "YugabyteDB",
    "YugabyteDBCluster",
    "cluster",
    "make",
    "start",
    "stop_all",
]

_MAKERS: dict[str, Callable[[], Server]] = {
    "postgresql15": lambda: PostgreSQL(15),
    "postgresql18": lambda: PostgreSQL(18),
    "yugabytedb": cluster_or_stand_in,
    "mysql": MySQL,
    "mariadb": MariaDB,
    # as on Windows: names of tables are folded
    "mariadb_lower": lambda: MariaDB("--lower-case-table-names=1"),
    "redis": Redis,
}

#: The servers that `start()` knows.
NAMES = ("postgresql15", "postgresql18", "yugabytedb", "mysql", "mariadb", "redis")

#: The clusters that `cluster()` knows, and the server that each node of one is.
CLUSTERS: dict[str, str] = {"galera": "mariadb", "group_replication": "mysql", "single_primary": "mysql"}


def make(name: str) -> Server:
    """Make a new server, to be started; raise `Unavailable` if something that it needs is missing."""
    return _MAKERS[name]()


def start(name: str) -> Server:
    """Start a new server; raise `Unavailable` if something that it needs is missing."""
    return make(name).start()


Node = GaleraNode | GroupMember


def cluster(name: str) -> Sequence[Node]:
    """Start three nodes of a cluster; raise `Unavailable` if something that they need is missing."""
    if name == "galera":
        return galera()
    return group_replication(multi_primary=name == "group_replication")

"""A Galera cluster of MariaDB, on loopback.

Debian's packages have what it takes: `galera-4` the replication, `mariadb-server` the script that gives a node that
joins the data of another one, `rsync` the program that this script runs.
"""

import socket
import time
from pathlib import Path

from typing_extensions import Self

from tests.servers.mariadb import MariaDB
from tests.servers.place import reserved_port
from tests.servers.process import program, run

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")
MISSING = "A Galera cluster can't be started: {0} is not there; the Debian package {1} brings it."


class GaleraNode(MariaDB):
    """A node of a Galera cluster: its first one, or one that joins those given."""

    kind = "galera"

    def __init__(self, *peers: "GaleraNode") -> None:
        super().__init__()
        self.name = f"{self.kind}{len(peers) + 1}"
        #: all nodes, this one included, in the order in which they were made
        self.nodes: list[GaleraNode] = [*peers, self]
        for peer in peers:
            peer.nodes.append(self)
        self._ports: list[socket.socket] = []

    def start(self) -> Self:
        """Start the node; the first one begins a cluster if no other one runs, and any other one joins it."""
        if not PROVIDER.is_file():
            program("libgalera_smm.so", "", MISSING.format(PROVIDER, "galera-4"))
        for name, package in (("wsrep_sst_rsync", "mariadb-server"), ("rsync", "rsync")):
            program(name, "/usr/bin", MISSING.format(f"/usr/bin/{name}", package))
        if not self._ports:
            #: of the group, of incremental and of full transfers
            self._ports = [reserved_port(self.host) for _ in range(3)]
        return super().start()

    @property
    def address(self) -> str:
        """Where the other nodes reach this one."""
        return self._at(0)

    def _at(self, number: int) -> str:
        return f"{self.host}:{self._ports[number].getsockname()[1]}"

    def _prepare(self) -> None:
        super()._prepare()
        if len(self.nodes) > 1:  # it gets the accounts from the first one
            (self.directory / "account.sql").write_text("")
        self._position: list[str] = []

    def _run(self) -> None:
        if (state := self.data / "grastate.dat").is_file():
            # InnoDB knows where a node that has crashed goes on: it then needs no copy of another one's data
            log = run(*self._command(), "--wsrep-recover", directory=self.directory)
            self._position = [f"--wsrep-start-position={log.rpartition('Recovered position: ')[2].split()[0]}"]
            # any node may begin the cluster again
            state.write_text(state.read_text().replace("safe_to_bootstrap: 0", "safe_to_bootstrap: 1"))
        super()._run()

    def _command(self) -> list[str | Path]:
        others = [node for node in self.nodes if node is not self]
        alone = not any(node.running for node in others)
        provider = (
            f"gmcast.listen_addr=tcp://{self.address};ist.recv_addr={self._at(1)};gcache.size=32M;"
            # a node that stops answering is given up soon
            "evs.keepalive_period=PT0.3S;evs.inactive_check_period=PT0.3S;evs.suspect_timeout=PT2S;"
            "evs.inactive_timeout=PT4S;evs.install_timeout=PT4S"
        )
        return [
            *super()._command(),
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
            "--wsrep-on=ON",
            f"--wsrep-provider={PROVIDER}",
            f"--wsrep-cluster-address=gcomm://{','.join(node.address for node in others)}",
            f"--wsrep-node-address={self.address}",
            f"--wsrep-node-name={self.name}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-sst-receive-address={self._at(2)}",
            f"--wsrep-provider-options={provider}",
            *self._position,
            *(["--wsrep-new-cluster"] if alone else []),
        ]

    def _ping(self) -> None:
        state = self.execute("SHOW STATUS WHERE Variable_name = 'wsrep_ready' AND Value = 'ON'")
        if state is None:
            raise RuntimeError("it has not joined the cluster yet")

    def heal(self) -> None:
        """Bring the node back, and wait until it is ready."""
        self.resume()
        if not self.running:
            self.start()
        deadline = time.monotonic() + self.start_seconds
        while True:
            try:
                return self._ping()
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def catch_up(self) -> None:
        """Wait until this node has applied all that any of them has committed."""
        self.execute("SET SESSION wsrep_sync_wait = 15", "SELECT 1")

    def _discard(self) -> None:
        for port in self._ports:
            port.close()
        self._ports = []
        for node in self.nodes:
            if node is not self:
                node.nodes.remove(self)
        self.nodes = [self]


def galera(size: int = 3) -> list[GaleraNode]:
    """Start a cluster."""
    nodes: list[GaleraNode] = []
    for _ in range(size):
        nodes.append(GaleraNode(*nodes).start())
    return nodes

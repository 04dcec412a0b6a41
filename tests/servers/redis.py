"""Redis as Debian packages it."""

import socket
import time
from pathlib import Path

from tests.servers.base import Server, StartFailed
from tests.servers.process import own, program


class Redis(Server):
    """A Redis server: without persistence, and not a cluster, unless it is asked for."""

    kind = "redis"

    def __init__(self, appendonly: bool = False, cluster: bool = False) -> None:
        super().__init__("redis")
        self.appendonly = appendonly
        self.cluster = cluster

    def url(self, driver: str = "redis", database: str | None = None) -> str:
        """The URL of the server; its databases are numbered."""
        return f"{driver}://{self.host}:{self.port}/{database or 0}"

    def _prepare(self) -> None:
        self._program = program(
            "redis-server",
            "/usr/bin:/usr/local/bin",
            "Redis is not installed: the program redis-server is missing; the Debian package redis-server brings it.",
        )
        self.data.mkdir()
        own(self.data)

    def _command(self) -> list[str | Path]:
        options = {
            "bind": self.host,
            "port": str(self.port),
            "dir": str(self.data),
            "save": "",  # No snapshots.
            "appendonly": "yes" if self.appendonly else "no",
            "cluster-enabled": "yes" if self.cluster else "no",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [self._program, *words]

    def _ping(self) -> None:
        self._ask("PING", "+PONG")

    def _provision(self) -> None:
        if self.cluster:  # Of this one node.
            for first in range(0, 16384, 1024):
                self._ask("CLUSTER ADDSLOTS " + " ".join(map(str, range(first, first + 1024))), "+OK")
            deadline = time.monotonic() + self.start_seconds
            while "cluster_state:ok" not in self._ask("CLUSTER INFO", "$"):
                if time.monotonic() > deadline:
                    raise StartFailed(f"{self.name} does not become a cluster")
                time.sleep(0.02)

    def _ask(self, command: str, expected: str) -> str:
        with socket.create_connection((self.host, self.port), timeout=60) as client:
            client.sendall(command.encode() + b"\r\n")
            answer = client.recv(4096).decode()
        if not answer.startswith(expected):
            raise ConnectionError(f"Redis answers {answer!r}")
        return answer

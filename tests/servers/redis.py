"""Redis as Debian packages it."""

import socket
from pathlib import Path

from .base import Server
from .process import own, program


class Redis(Server):
    """A Redis server: without persistence unless it is asked for."""

    kind = "redis"

    def __init__(self, appendonly: bool = False) -> None:
        super().__init__("redis")
        self.appendonly = appendonly

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
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [self._program, *words]

    def _ping(self) -> None:
        with socket.create_connection((self.host, self.port), timeout=10) as client:
            client.sendall(b"PING\r\n")
            answer = client.recv(64)
        if not answer.startswith(b"+PONG"):
            raise ConnectionError(f"Redis answers {answer!r}")

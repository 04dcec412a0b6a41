"""A pooler as a PostgreSQL client sees it: it reports another server process id than the one that serves."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from sqlalchemy import make_url


class Pooler:
    """Forwards bytes both ways, and replaces the process id in BackendKeyData by an invented one."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """The URL that leads through it; unencrypted, so that it can be read."""
        host, port = self._listener.getsockname()
        through = self._url.set(host=host, port=port).update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        return through.render_as_string(hide_password=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((str(self._url.host), int(self._url.port or 5432)))
                for source, target, lies in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._carry, args=(source, target, lies), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, lies: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(_other_process(data) if lies else data)
            target.shutdown(socket.SHUT_WR)


def _other_process(data: bytes) -> bytes:
    at = data.find(b"K\x00\x00\x00\x0c")
    if at < 0:
        return data
    (pid,) = struct.unpack_from("!i", data, at + 5)
    return data[: at + 5] + struct.pack("!i", pid + 1) + data[at + 9 :]

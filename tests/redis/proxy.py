"""A TCP proxy in front of Redis that counts requests, and drops the replies that a test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType


class Proxy:
    """Forwards bytes in both directions, one thread per connection.

    ``lose(when, meanwhile)``: the next request that contains ``when`` is forwarded; when the server has executed it,
    ``meanwhile()`` is called, and the connection is closed without the reply.
    """

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[bytes] = []
        self._loses: tuple[bytes, Callable[[], object]] | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def lose(self, when: bytes, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._loses = when, meanwhile

    @property
    def has_lost(self) -> bool:
        return self._loses is None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                carrier = threading.Thread(target=self._carry, args=(client, server), daemon=True)
                self._threads.append(carrier)
                carrier.start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        # each reply comes before the next request: redis-py doesn't pipeline the calls of these tests
        with client, server, contextlib.suppress(OSError):
            while request := client.recv(1 << 20):
                self.requests.append(request)
                server.sendall(request)
                answer = server.recv(1 << 20)
                carried_out = not answer.startswith(b"-NOSCRIPT")
                if self._loses is not None and self._loses[0] in request and carried_out:
                    try:
                        self._loses[1]()
                    finally:
                        self._loses = None
                    break
                client.sendall(answer)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()  # the connection that it accepted last is closed, too
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for carrier in self._threads:
            carrier.join()

"""Count the round trips between a client and its server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class Wire:
    """A TCP proxy in front of a server that counts round trips.

    A round trip begins when the client sends after the server has sent (or for the first time). Everything that the
    client sends before the next answer belongs to the same one, as in a pipeline.

    :param delay: the time that a round trip takes besides, in seconds.
    """

    def __init__(self, host: str, port: int, delay: float = 0) -> None:
        self._server = host, port
        self.delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.round_trips = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """End all connections, and their threads."""
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._sockets):
            end.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._sockets.append(end)
                conversation = _Conversation(self)
                for source, target, speaker in ((client, server, "client"), (server, client, "server")):
                    self._start(conversation.carry, source, target, speaker)


class _Conversation:
    """One connection, and which side has sent last."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._speaker = "server"

    def carry(self, source: socket.socket, target: socket.socket, speaker: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                # counted before it is passed on, so that the count includes it when the client has its answer
                if speaker == "client" and self._speaker == "server":
                    self._wire.round_trips += 1
                self._speaker = speaker
                if self._wire.delay:
                    time.sleep(self._wire.delay / 2)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

"""A TCP proxy in front of a server, whose connections can be cut in the middle."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from sqlalchemy import make_url


class Proxy:
    """Forwards bytes both ways until it is told to ``cut`` what it carries; new connections are carried again."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        assert self._url.host is not None
        self._server = (self._url.host, self._url.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._guard = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.accepted = 0
        self._lost: tuple[bytes, Callable[[], object]] | None = None
        #: the answers that were kept back
        self.losses = 0
        self._threads: list[threading.Thread] = []
        self._acceptor = self._start(self._accept)

    @property
    def url(self) -> str:
        """The URL that leads through it."""
        host, port = self._listener.getsockname()
        return self._url.set(host=host, port=port).render_as_string(hide_password=False)

    def cut(self) -> None:
        """Close everything that is open, as a machine between the two does that is switched off."""
        with self._guard:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def lose_answer(self, to: bytes, meanwhile: Callable[[], object] = lambda: None, *, always: bool = False) -> None:
        """Keep the answer back to the next request with ``to`` in it, do something ``meanwhile``, and cut.

        The server has then done what it was asked for, and whoever asked can't know.
        """
        self._always = always
        self._lost = to, meanwhile

    def answer_all(self) -> None:
        self._lost = None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if threading.current_thread() is not self._acceptor:
            self._acceptor.join()  # what it has accepted last is cut, too
        self.cut()
        for thread in self._threads:
            if thread is not threading.current_thread():  # one that is doing something meanwhile may close it
                thread.join()

    def _start(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self.accepted += 1
                self._pairs.append((client, server))
            losing: list[Callable[[], object]] = []
            self._start(self._ask, client, server, losing)
            self._start(self._answer, server, client, losing)

    def _ask(self, source: socket.socket, target: socket.socket, losing: list[Callable[[], object]]) -> None:
        def sent(data: bytes) -> bool:
            lost = self._lost
            if lost is not None and lost[0] in data:
                if not self._always:
                    self._lost = None
                losing.append(lost[1])
            return True

        self._forward(source, target, sent)

    def _answer(self, source: socket.socket, target: socket.socket, losing: list[Callable[[], object]]) -> None:
        def wanted(data: bytes) -> bool:
            if not losing:
                return True
            self.losses += 1
            try:
                losing.pop()()
            finally:
                # whatever went wrong meanwhile, who asked must not wait for ever
                for end in (source, target):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
            return False

        self._forward(source, target, wanted)

    def _forward(self, source: socket.socket, target: socket.socket, wanted: Callable[[bytes], bool]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if wanted(data):
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

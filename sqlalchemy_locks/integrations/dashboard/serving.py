"""Serve the page on this machine with the standard library's server; not for public use."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard.app import wsgi

_HOST = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    # browsers open connections in advance and leave them idle
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a closed browser is no error
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: the only visitor is on this machine."""

    def address_string(self) -> str:
        return str(self.client_address[0])


@contextlib.contextmanager
def served(locks: Locks, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve the page on 127.0.0.1 while the block runs, and yield its address.

    :param port: 0 chooses a free one.
    :param options: as for :func:`sqlalchemy_locks.integrations.dashboard.wsgi`.
    :raises OSError: when the port can't be used.
    """
    server = _Server((_HOST, port), _Handler)
    try:
        port = server.server_address[1]
        server.set_app(wsgi(locks, hosts=[f"{host}:{port}" for host in (_HOST, "localhost")], **options))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{_HOST}:{port}/"
        finally:
            server.shutdown()
            thread.join()
    finally:
        server.server_close()

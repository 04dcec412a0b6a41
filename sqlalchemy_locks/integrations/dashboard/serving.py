"""The page on this machine alone, by the standard library's server: for looking, never for the public."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard.app import wsgi
from sqlalchemy_locks.integrations.dashboard.http import Request

_HOST = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    # browsers open connections beforehand, on which they say nothing
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a browser that went away is no news
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not told: who looks is the only visitor."""

    def address_string(self) -> str:
        return str(self.client_address[0])


@contextlib.contextmanager
def served(locks: Locks, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve the page on 127.0.0.1 while the block runs; gives its address.

    :param port: 0 chooses one that is free.
    :param options: as :func:`sqlalchemy_locks.integrations.dashboard.wsgi`.
    :raises OSError: when the port is not to be had.
    """
    server = _Server((_HOST, port), _Handler)
    try:
        port = server.server_address[1]
        server.set_app(wsgi(locks, view=_only(port), **options))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{_HOST}:{port}/"
        finally:
            server.shutdown()
            thread.join()
    finally:
        server.server_close()


def _only(port: int) -> Callable[[Request], bool]:
    """Another site may give this address a name of its own, and would then be read by it."""
    names = {f"{host}:{port}" for host in (_HOST, "localhost")}
    return lambda request: request.host.lower() in names

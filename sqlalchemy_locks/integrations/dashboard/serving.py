"""Serve the page on this machine; not for public use."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from sqlalchemy_locks.integrations.dashboard.app import asgi

if TYPE_CHECKING:
    from sqlalchemy_locks.facade.async_locks import AsyncLocks
    from sqlalchemy_locks.facade.locks import Locks

_HOST = "127.0.0.1"


@contextlib.contextmanager
def served(locks: AsyncLocks | Locks, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve the page on 127.0.0.1 while the block runs, and yield its address.

    :param port: 0 chooses a free one.
    :param options: as for :func:`sqlalchemy_locks.integrations.dashboard.asgi`.
    :raises OSError: when the port can't be used.
    """
    options.setdefault("view", lambda request: True)
    with serve(asgi(locks, hosts=[_HOST, "localhost"], **options), port) as address:
        yield address


@contextlib.contextmanager
def serve(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serve an app on 127.0.0.1, in a thread, while the block runs, and yield its address."""
    with socket.create_server((_HOST, port)) as listener:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, proxy_headers=False, timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://{_HOST}:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()

"""A folder and a port for a server."""

import socket
import tempfile
from pathlib import Path

from tests.servers.process import own, reachable

#: Where the folders are made; `None`: where temporary files are.
root: Path | None = None


def temporary_folder(name: str) -> Path:
    """A new folder for a server, where its account can reach it.

    Its path is short, because that of a Unix socket has at most 107 bytes.
    """
    parent = root or Path(tempfile.gettempdir())
    if len(str(parent)) > 50 or not reachable(parent):
        parent = Path("/var/tmp")
    path = Path(tempfile.mkdtemp(prefix=f"locks-{name}-", dir=parent))
    own(path)
    return path


def reserved_port(host: str) -> socket.socket:
    """A socket that holds a free port until it is closed.

    As it does not listen, and as servers set SO_REUSEADDR too, the server can bind the
    same port. No other process gets it: no other test run that looks for a free port,
    and no client for its end of a connection while the server is down.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder

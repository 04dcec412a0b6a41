"""The common part of all servers: a folder, a port, start and stop."""

import atexit
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from typing_extensions import Self

from tests.servers.place import reserved_port, temporary_folder
from tests.servers.process import Process, Unavailable

__all__ = ["Server", "StartFailed", "Unavailable", "stop_all"]

_servers: list["Server"] = []
_servers_lock = threading.Lock()


class StartFailed(Exception):
    """A server failed to start; the message has the end of its log."""


class Server:
    """A server of the test suite, with its own folder and port.

    It is made by its class, and runs after `start()`. `stop()` and `kill()` keep its
    folder, so that `restart()` brings back the same data at the same port; `close()`,
    and so the end of the test process, removes the folder.
    """

    kind: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_seconds: ClassVar[float] = 180.0
    stop_seconds: ClassVar[float] = 120.0

    host: str = "127.0.0.1"
    port: int
    directory: Path

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: Process | None = None
        self._holder: socket.socket | None = None
        self._owner = os.getpid()

    # What each kind of server defines.

    def url(self, driver: str, database: str | None = None) -> str:
        """The URL at which the driver named reaches the server."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Make the data folder, once, before the first start."""

    def _command(self) -> list[str | Path]:
        """The command that runs the server in the foreground."""
        raise NotImplementedError

    def _ping(self) -> None:
        """Connect as a client does; raise if the server does not answer yet."""
        raise NotImplementedError

    def _provision(self) -> None:
        """Create what clients expect, once, after the first start."""

    def _discard(self) -> None:
        """Free the resources that a killed server has left outside its folder."""

    # What all servers share.

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.directory / "server.log"

    @property
    def data(self) -> Path:
        """The folder with the server's data."""
        return self.directory / "data"

    @property
    def running(self) -> bool:
        """Whether the server has been started and has not ended since."""
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int:
        """The id of the server's main process."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        if self._holder is not None:
            self.stop()  # It may have ended by itself.
            self._run()
            return self
        self.directory = temporary_folder(self.name)
        self._holder = reserved_port(self.host)
        self.port = self._holder.getsockname()[1]
        with _servers_lock:
            _servers.append(self)
        try:
            self._prepare()
            self._run()
            self._provision()
        except BaseException:
            self.close()
            raise
        return self

    def _run(self) -> None:
        self._process = Process(self._command(), self.directory, self.log, self.stop_signal)
        deadline = time.monotonic() + self.start_seconds
        while True:
            try:
                with socket.create_connection((self.host, self.port), timeout=60):
                    pass
                self._ping()
            except ImportError:  # The driver is missing: retrying can't help.
                raise
            except Exception as error:
                if self.running and time.monotonic() < deadline:
                    time.sleep(0.03)
                    continue
                state = "does not answer" if self.running else "ended immediately"
                self.kill()
                tail = self.log.read_text(errors="replace")[-4000:]
                raise StartFailed(f"{self.name} {state}: {error}\nThe end of its log:\n{tail}") from error
            return

    def stop(self) -> None:
        """Stop the server cleanly; by force if it has not ended in `stop_seconds`."""
        if self._process is not None:
            self._process.signal(signal.SIGCONT)
            self._process.signal(self.stop_signal)
            if self._process.wait(self.stop_seconds):
                self._process = None
        self.kill()

    def kill(self) -> None:
        """Kill all of the server's processes together, as a crash does."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
            if not self._process.wait(120):
                raise RuntimeError(f"{self.name} cannot be killed")
            self._process = None

    def restart(self) -> None:
        """Stop the server, if it runs, and start it with the same port and data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze all of the server's processes: connections stay, unanswered."""
        if self._process is not None:
            self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a paused server."""
        if self._process is not None:
            self._process.signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and remove its folder, and so its data."""
        _close([self])

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close(servers: list[Server]) -> None:
    """Close servers; they are killed, since their data is removed anyway."""
    for server in servers:
        server.kill()
        if server._holder is not None:
            server._discard()
            shutil.rmtree(server.directory, ignore_errors=True)
            server._holder.close()
            server._holder = None
        with _servers_lock:
            if server in _servers:
                _servers.remove(server)


@atexit.register
def stop_all() -> None:
    """Close all servers that this process has started (a forked child none)."""
    with _servers_lock:
        mine = [server for server in _servers if server._owner == os.getpid()]
    _close(mine)

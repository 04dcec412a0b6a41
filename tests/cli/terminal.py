"""A command in a terminal of its own, as a user has one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from tests.fixtures.descriptors import readable
from tests.fixtures.parties import PATIENCE

_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal: its screen and its keyboard."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self.process, self._keyboard = process, keyboard
        self.raw = ""

    @property
    def text(self) -> str:
        """The text without control sequences."""
        return _MOVES.sub("", self.raw)

    def until(self, said: str) -> None:
        """Read until a text has been printed."""
        end = time.monotonic() + PATIENCE
        while said not in self.text:
            assert time.monotonic() < end, self.text
            assert self._read(1.0), self.text

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def ended(self) -> int:
        """Read to the end, and return the exit code."""
        end = time.monotonic() + PATIENCE
        while self._read(1.0):
            assert time.monotonic() < end, self.text
        return self.process.wait(PATIENCE)

    def _read(self, seconds: float) -> bool:
        """Read once; return whether there may be more output."""
        if not readable(self._keyboard, within=seconds):
            return True
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def terminal(
    *arguments: str, columns: int = 80, module: str = "sqlalchemy_locks", **environment: str
) -> Iterator[Terminal]:
    """Run ``sqlalchemy-locks``, or another module, in a terminal of the given width."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=there,
        stdout=there,
        stderr=there,
        env={**clean, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(there)
    try:
        yield Terminal(process, here)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(here)

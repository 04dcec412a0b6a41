"""SQLite: a file in the database's folder in which the waiters of a semaphore, of all processes, queue in FIFO order.

SQLite keeps no list of waiters. For the write lock, polling is fair enough (``sqlite.py``); a turn in a semaphore is
two committed transactions long, and a random order would let one of eight waiters wait for seconds. Only the order
depends on the file: whether permits are granted is decided in the database. If the file can't be written, or is
removed, only the order is lost.

The file has the database's name with ``-sqlalchemy-locks`` appended, and exists while there are waiters.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

#: seconds without a heartbeat after which a waiter is skipped: it is stopped, or died on another machine
IDLE_WRITER = 1.0
#: the longest wait for the file itself, in seconds
_BUSY = 0.02
#: the shortest and longest pause between two checks, in seconds
_SHORTEST, _LONGEST = 0.001, 0.25

# AUTOINCREMENT never reuses a number: a waiter that was considered dead must find that its ticket is gone
_TABLE = (
    "CREATE TABLE IF NOT EXISTS waiter (ticket INTEGER PRIMARY KEY AUTOINCREMENT, key INTEGER NOT NULL, seen REAL NOT "
    "NULL, place TEXT NOT NULL, pid INTEGER NOT NULL)"
)
# by the distance: after a clock was set back, the dead would stay alive
_ALIVE = "SELECT count(*) FROM waiter WHERE abs(seen - :now) < :idle"
_HERE = f"{_ALIVE} AND key = :key"
_BEFORE = f"{_HERE} AND ticket < :mine"
_FIRST = "SELECT ticket, place, pid FROM waiter WHERE key = :key AND abs(seen - :now) < :idle ORDER BY ticket LIMIT 1"
_JOIN = "INSERT INTO waiter (key, seen, place, pid) VALUES (:key, :now, :place, :pid)"
_REFRESH = "UPDATE waiter SET seen = :now WHERE ticket = :mine AND key = :key"
_LEAVE = "DELETE FROM waiter WHERE ticket = :mine AND key = :key"
_FORGET = "DELETE FROM waiter WHERE abs(seen - :now) > 10 * :idle"


class FileQueue:
    """The queues of one database, one for each key.

    :param database: the path of the database file.
    """

    def __init__(self, database: str) -> None:
        self.database = database
        self.path = f"{database}-sqlalchemy-locks"

    def has_waiters(self, key: int) -> bool:
        """Return whether a key has waiters; without any waiter, only the existence of the file is checked."""
        if not os.path.exists(self.path):
            return False
        with self.errors_ignored(), contextlib.closing(self.open("rw")) as file:
            try:
                while file.execute(_HERE, parameters(key=key)).fetchone()[0]:
                    if not self.remove_dead(file, key):
                        return True
                if file.execute(_ALIVE, parameters()).fetchone()[0]:
                    return False
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):  # the process that created it was killed, perhaps
                    raise
            file.execute("BEGIN IMMEDIATE")
            file.execute(_TABLE)
            self.commit(file)
        return False

    def ticket(self, key: int) -> FileTicket:
        """Join the end of the queue of a key."""
        return FileTicket(self, key)

    def create(self) -> None:
        """Create the file, with the permissions of the database."""
        if self.file_id() is not None:
            return
        self.open("rwc").close()
        with contextlib.suppress(OSError):
            like = os.stat(self.database)
            os.chmod(self.path, like.st_mode & 0o666)
            if hasattr(os, "chown"):
                os.chown(self.path, -1, like.st_gid)
                os.chown(self.path, like.st_uid, -1)  # root alone can

    def open(self, mode: str) -> sqlite3.Connection:
        """Open the file.

        :param mode: ``rwc`` creates it if it doesn't exist; with ``rw`` that is an error.
        """
        path = quote(self.path.replace(os.sep, "/"))
        # an absolute path begins with a slash, or with a drive letter
        uri = f"file://{'' if path.startswith('/') else '/'}{path}?mode={mode}"
        file = sqlite3.connect(uri, timeout=_BUSY, isolation_level=None, check_same_thread=False, uri=True)
        try:
            # its content is useless after a crash
            file.execute("PRAGMA synchronous = OFF")
            file.execute("PRAGMA journal_mode = MEMORY")
            if mode == "rwc":
                file.execute(_TABLE)
        except BaseException:
            file.close()
            raise
        return file

    def file_id(self) -> tuple[int, int] | None:
        """Return which file has the name now; ``None`` if there is none."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            return found.st_dev, found.st_ino
        return None

    def commit(self, file: sqlite3.Connection) -> None:
        """Commit, and remove the file if there are no waiters; a process that has just opened it notices that."""
        if not file.execute(_ALIVE, parameters()).fetchone()[0]:
            with contextlib.suppress(OSError):  # Windows keeps a file that is open
                os.unlink(self.path)
        file.execute("COMMIT")

    def remove_dead(self, file: sqlite3.Connection, key: int) -> bool:
        """Remove the first ticket if it belongs to a dead process of this machine; return whether it did."""
        first = file.execute(_FIRST, parameters(key=key)).fetchone()
        if first is None:
            return False
        ticket, place, pid = first
        if not place or place != pid_namespace() or pid == os.getpid() or process_exists(pid):
            return False
        return bool(file.execute(_LEAVE, parameters(key=key, mine=ticket)).rowcount)

    @contextlib.contextmanager
    def errors_ignored(self) -> Iterator[None]:
        """Ignore errors of the file, which cost only the order."""
        try:
            yield
        except (sqlite3.OperationalError, OSError):
            pass  # another process writes for long, or the folder isn't writable
        except sqlite3.DatabaseError:
            # half written by a process that was killed
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class FileTicket:
    """A place in the queue of a key, until :meth:`leave`."""

    def __init__(self, queue: FileQueue, key: int) -> None:
        self._queue, self._key = queue, key
        #: open while the place is held, so that no other file gets its inode number
        self._file: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None
        self._number = 0
        self._refreshed = 0.0
        self._before = -1
        self._moved = self._answered = time.monotonic()
        with queue.errors_ignored():
            self._join()

    def __enter__(self) -> FileTicket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def before(self) -> int:
        """Return how many waiters are in front; 0 if there is no queue after all. It is also a heartbeat."""
        before = 0
        with self._queue.errors_ignored():
            try:
                before = self._count_before()
            except sqlite3.OperationalError as error:
                # another process writes; one that was stopped while it wrote is not waited for
                if "locked" in str(error) and time.monotonic() - self._answered < IDLE_WRITER:
                    return max(1, self._before)
                self._drop()
        self._answered = time.monotonic()
        if before != self._before:
            self._before, self._moved = before, time.monotonic()
        return before

    def _count_before(self) -> int:
        self._refresh_or_rejoin()
        while self._file is not None:
            (before,) = self._file.execute(_BEFORE, self._parameters()).fetchone()
            if not before or not self._queue.remove_dead(self._file, self._key):
                return int(before)
        return 0

    def refresh(self) -> None:
        """Leave a heartbeat, which is needed more often than every ``IDLE_WRITER`` seconds."""
        with self._queue.errors_ignored():
            self._refresh_or_rejoin()

    def pause(self) -> float:
        """Return the pause until the next check: a tenth of the time since the queue moved, per waiter in front."""
        since = max(_SHORTEST, (time.monotonic() - self._moved) / 10)
        return min(_LONGEST, since * max(1, self._before))

    def leave(self) -> None:
        """Leave the queue."""
        file = self._file
        if file is None:
            return
        try:
            with self._queue.errors_ignored():
                file.execute("BEGIN IMMEDIATE")
                file.execute(_LEAVE, self._parameters())
                if self._queue.file_id() == self._file_id:
                    self._queue.commit(file)
                else:
                    file.execute("COMMIT")
        finally:
            self._drop()

    def _refresh_or_rejoin(self) -> None:
        if self._file is None:
            return
        if self._queue.file_id() != self._file_id:
            self._join()
        elif time.monotonic() - self._refreshed > IDLE_WRITER / 4:
            kept = self._file.execute(_REFRESH, self._parameters()).rowcount
            self._refreshed = time.monotonic()
            if not kept:
                self._join()

    def _join(self) -> None:
        self.leave()
        try:
            # again if the last waiter to leave has removed the file meanwhile
            for _ in range(5):
                if self._try_join():
                    return
                self._drop()
        except BaseException:
            self._drop()
            raise

    def _try_join(self) -> bool:
        self._queue.create()
        self._file_id = self._queue.file_id()
        if self._file_id is None:
            return False
        file = self._file = self._queue.open("rw")
        file.execute("BEGIN IMMEDIATE")
        if self._queue.file_id() != self._file_id:
            return False
        file.execute(_TABLE)
        file.execute(_FORGET, parameters())
        self._number = (
            file.execute(_JOIN, {**parameters(key=self._key), "place": pid_namespace(), "pid": os.getpid()}).lastrowid
            or 0
        )
        file.execute("COMMIT")
        self._refreshed = time.monotonic()
        return True

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _parameters(self) -> dict[str, Any]:
        return parameters(key=self._key, mine=self._number)


def parameters(**given: int) -> dict[str, Any]:
    """Return the parameters of a statement, with the time and ``IDLE_WRITER``."""
    return {"now": time.time(), "idle": IDLE_WRITER, **given}


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine exists; true if that is unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@cache
def pid_namespace() -> str:
    """Return what identifies the namespace of process ids; empty if unknown, as on other systems than Linux."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    return ""

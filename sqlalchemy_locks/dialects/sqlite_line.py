"""SQLite: those who wait, of all processes, in the order in which they came, in a small file beside the database.

SQLite keeps no list of who waits: each looks again by itself, up to a tenth of a second later, and whoever lets go and
comes again at once is served before all of them. A ticket here is a place in a line. Nothing but the order depends on
it: whether a lock or a permit is had is decided in the database and nowhere else, and where the file can't be had, or
somebody takes it away, the order is lost and nothing more.

The file has the database's name with ``-sqlalchemy-locks`` after it, and is there while somebody waits.
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

#: seconds of silence after which whoever has a ticket is passed over: stopped, or dead on another machine
IDLE = 1.0
#: seconds for which the file itself is waited for
_BUSY = 0.02
#: seconds between two looks
_SHORTEST, _LONGEST = 0.001, 0.25

# numbers that never come again: who was taken for dead, and isn't, must find that its ticket is gone
_TABLE = (
    "CREATE TABLE IF NOT EXISTS line (ticket INTEGER PRIMARY KEY AUTOINCREMENT, key INTEGER NOT NULL, seen REAL NOT "
    "NULL, place TEXT NOT NULL, pid INTEGER NOT NULL)"
)
# by the distance, since a clock that was set back would have the dead live on
_ALIVE = "SELECT count(*) FROM line WHERE abs(seen - :now) < :idle"
_HERE = f"{_ALIVE} AND key = :key"
_BEFORE = f"{_HERE} AND ticket < :mine"
_FIRST = "SELECT ticket, place, pid FROM line WHERE key = :key AND abs(seen - :now) < :idle ORDER BY ticket LIMIT 1"
_JOIN = "INSERT INTO line (key, seen, place, pid) VALUES (:key, :now, :place, :pid)"
_STAY = "UPDATE line SET seen = :now WHERE ticket = :mine AND key = :key"
_LEAVE = "DELETE FROM line WHERE ticket = :mine AND key = :key"
_FORGET = "DELETE FROM line WHERE abs(seen - :now) > 10 * :idle"


class Line:
    """The lines of one database, one for each key.

    :param database: the path of its file.
    """

    def __init__(self, database: str) -> None:
        self.database = database
        self.path = f"{database}-sqlalchemy-locks"

    def anybody(self, key: int) -> bool:
        """Whether somebody stands in the line of a key; a look at the folder where nobody stands in any."""
        if not os.path.exists(self.path):
            return False
        with self.forgiven(), contextlib.closing(self.open("rw")) as file:
            try:
                while file.execute(_HERE, asked(key=key)).fetchone()[0]:
                    if not self.without_the_dead(file, key):
                        return True
                if file.execute(_ALIVE, asked()).fetchone()[0]:
                    return False
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):  # whoever was about to make it was killed, perhaps
                    raise
            file.execute("BEGIN IMMEDIATE")
            file.execute(_TABLE)
            self.end(file)
        return False

    def ticket(self, key: int) -> Ticket:
        """Come to the end of the line of a key."""
        return Ticket(self, key)

    def make(self) -> None:
        """Have the file, for those for whom the database is."""
        if self.there() is not None:
            return
        self.open("rwc").close()
        with contextlib.suppress(OSError):
            like = os.stat(self.database)
            os.chmod(self.path, like.st_mode & 0o666)
            if hasattr(os, "chown"):
                os.chown(self.path, -1, like.st_gid)
                os.chown(self.path, like.st_uid, -1)  # root alone can

    def open(self, mode: str) -> sqlite3.Connection:
        """The file. :param mode: ``rwc`` makes it where it isn't there, which is an error with ``rw``."""
        path = quote(self.path.replace(os.sep, "/"))
        # an absolute path begins with one slash, or with the letter of a drive
        uri = f"file://{'' if path.startswith('/') else '/'}{path}?mode={mode}"
        file = sqlite3.connect(uri, timeout=_BUSY, isolation_level=None, check_same_thread=False, uri=True)
        try:
            # nothing in it is of use after a crash
            file.execute("PRAGMA synchronous = OFF")
            file.execute("PRAGMA journal_mode = MEMORY")
            if mode == "rwc":
                file.execute(_TABLE)
        except BaseException:
            file.close()
            raise
        return file

    def there(self) -> tuple[int, int] | None:
        """Which file it is that has the name now."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            return found.st_dev, found.st_ino
        return None

    def end(self, file: sqlite3.Connection) -> None:
        """Commit, without the file where nobody is in it any more; whoever has just opened it sees that it is gone."""
        if not file.execute(_ALIVE, asked()).fetchone()[0]:
            with contextlib.suppress(OSError):  # Windows keeps what somebody has open
                os.unlink(self.path)
        file.execute("COMMIT")

    def without_the_dead(self, file: sqlite3.Connection, key: int) -> bool:
        """Take the first one's ticket away, if it is of a process of this machine that is dead: whether it was."""
        first = file.execute(_FIRST, asked(key=key)).fetchone()
        if first is None:
            return False
        ticket, place, pid = first
        if not place or place != here() or pid == os.getpid() or alive(pid):
            return False
        return bool(file.execute(_LEAVE, asked(key=key, mine=ticket)).rowcount)

    @contextlib.contextmanager
    def forgiven(self) -> Iterator[None]:
        """Whatever goes wrong inside costs the order, and nothing else."""
        try:
            yield
        except (sqlite3.OperationalError, OSError):
            pass  # somebody is writing for long, or the folder can't be written in
        except sqlite3.DatabaseError:
            # half written by whoever was killed then
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class Ticket:
    """A place in the line of a key, from here to :meth:`leave`."""

    def __init__(self, line: Line, key: int) -> None:
        self._line, self._key = line, key
        #: open for as long as there is a place, so that nobody else's file gets the number of this one
        self._file: sqlite3.Connection | None = None
        self._which: tuple[int, int] | None = None
        self._number = 0
        self._told = 0.0
        self._before = -1
        self._moved = self._answered = time.monotonic()
        with line.forgiven():
            self._join()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def before(self) -> int:
        """How many come before; none, too, where there is no line after all. Whoever asks is alive."""
        before = 0
        with self._line.forgiven():
            try:
                before = self._counted()
            except sqlite3.OperationalError as error:
                # somebody is writing; who was stopped in the midst of that is not waited for
                if "locked" in str(error) and time.monotonic() - self._answered < IDLE:
                    return max(1, self._before)
                self._drop()
        self._answered = time.monotonic()
        if before != self._before:
            self._before, self._moved = before, time.monotonic()
        return before

    def _counted(self) -> int:
        self._stay()
        while self._file is not None:
            (before,) = self._file.execute(_BEFORE, self._asked()).fetchone()
            if not before or not self._line.without_the_dead(self._file, self._key):
                return int(before)
        return 0

    def stay(self) -> None:
        """Tell that one is alive; to be told more often than each ``IDLE`` seconds."""
        with self._line.forgiven():
            self._stay()

    def pause(self) -> float:
        """Seconds until the next look: a tenth of the time since the line moved, times those who come before."""
        since = max(_SHORTEST, (time.monotonic() - self._moved) / 10)
        return min(_LONGEST, since * max(1, self._before))

    def leave(self) -> None:
        """Give the place up."""
        file = self._file
        if file is None:
            return
        try:
            with self._line.forgiven():
                file.execute("BEGIN IMMEDIATE")
                file.execute(_LEAVE, self._asked())
                if self._line.there() == self._which:
                    self._line.end(file)
                else:
                    file.execute("COMMIT")
        finally:
            self._drop()

    def _stay(self) -> None:
        if self._file is None:
            return
        if self._line.there() != self._which:
            self._join()
        elif time.monotonic() - self._told > IDLE / 4:
            kept = self._file.execute(_STAY, self._asked()).rowcount
            self._told = time.monotonic()
            if not kept:
                self._join()

    def _join(self) -> None:
        self.leave()
        try:
            # again, where the last one to leave has taken the file away meanwhile
            for _ in range(5):
                if self._joined():
                    return
                self._drop()
        except BaseException:
            self._drop()
            raise

    def _joined(self) -> bool:
        self._line.make()
        self._which = self._line.there()
        if self._which is None:
            return False
        file = self._file = self._line.open("rw")
        file.execute("BEGIN IMMEDIATE")
        if self._line.there() != self._which:
            return False
        file.execute(_TABLE)
        file.execute(_FORGET, asked())
        self._number = file.execute(_JOIN, {**asked(key=self._key), "place": here(), "pid": os.getpid()}).lastrowid or 0
        file.execute("COMMIT")
        self._told = time.monotonic()
        return True

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _asked(self) -> dict[str, Any]:
        return asked(key=self._key, mine=self._number)


def asked(**given: int) -> dict[str, Any]:
    """What a statement is given: besides this, the time, and how long one may be silent."""
    return {"now": time.time(), "idle": IDLE, **given}


def alive(pid: int) -> bool:
    """Whether a process of this machine is there, as far as can be told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@cache
def here() -> str:
    """Where the number of a process means this very process; empty where that can't be told, as not on Linux."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    return ""

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
from types import TracebackType
from typing import Any

#: seconds of silence after which whoever has a ticket is passed over: dead, or stopped
IDLE = 2.0
#: seconds for which the file itself is waited for
_BUSY = 0.05
#: seconds between two looks
_SHORTEST, _LONGEST = 0.001, 0.25

_TABLE = "CREATE TABLE IF NOT EXISTS line (ticket INTEGER PRIMARY KEY, key INTEGER NOT NULL, seen REAL NOT NULL)"
# by the distance, since a clock that was set back would have the dead live on
_ALIVE = "SELECT count(*) FROM line WHERE abs(seen - :now) < :idle"
_HERE = f"{_ALIVE} AND key = :key"
_BEFORE = f"{_HERE} AND ticket < :mine"
_JOIN = "INSERT INTO line (key, seen) VALUES (:key, :now)"
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
        with self.forgiven(), contextlib.closing(self.open()) as file:
            if file.execute(_HERE, asked(key=key)).fetchone()[0]:
                return True
            if not file.execute(_ALIVE, asked()).fetchone()[0]:
                # what the dead have left
                file.execute("BEGIN IMMEDIATE")
                self.end(file)
        return False

    def ticket(self, key: int) -> Ticket:
        """Come to the end of the line of a key."""
        return Ticket(self, key)

    def open(self) -> sqlite3.Connection:
        """The file, which is made as the database's own was where it isn't there."""
        with contextlib.suppress(FileExistsError):
            like = os.stat(self.database)
            made = os.open(self.path, os.O_CREAT | os.O_EXCL, like.st_mode & 0o666)
            with contextlib.suppress(OSError, AttributeError):  # the database is another user's, or this is Windows
                os.fchmod(made, like.st_mode & 0o666)
                os.fchown(made, like.st_uid, like.st_gid)
            os.close(made)
        file = sqlite3.connect(self.path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        # nothing in it is of use after a crash
        file.execute("PRAGMA synchronous = OFF")
        file.execute("PRAGMA journal_mode = MEMORY")
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
        self._moved = time.monotonic()
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
                self._stay()
                if self._file is not None:
                    (before,) = self._file.execute(_BEFORE, self._asked()).fetchone()
            except sqlite3.OperationalError as error:
                if "locked" in str(error):  # somebody is writing
                    return max(1, self._before)
                self._drop()
        if before != self._before:
            self._before, self._moved = before, time.monotonic()
        return before

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
        was = self._line.there()
        file = self._file = self._line.open()
        file.execute("BEGIN IMMEDIATE")
        self._which = self._line.there()
        if self._which is None or was not in (None, self._which):
            return False
        file.execute(_TABLE)
        file.execute(_FORGET, asked())
        self._number = file.execute(_JOIN, asked(key=self._key)).lastrowid or 0
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

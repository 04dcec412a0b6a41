"""YugabyteDB through the ``yugabytedb`` dialect name; ``postgresql://`` URLs to it work as well.

What differs, differs on the server: the migration reads ``version()`` there and installs the bodies that
lock rows of ``lock.locked_keys``. The statements that a client sends are PostgreSQL's, but for the line of who waits
for room: a lock on such a row, since its advisory locks are too new to count on.
"""

from __future__ import annotations

from sqlalchemy.engine import Connection

from sqlalchemy_locks.dialects.postgresql import PostgreSQL, join_by_row


class YugabyteDB(PostgreSQL):
    name = "YugabyteDB"
    supports_listen = False
    held_keys = None
    holders_unavailable = "whose locks are row locks, which no table of the server's lists"

    def join_queue(self, connection: Connection, key: int, seconds: float) -> bool:
        join_by_row(connection, key, self.wait_value(seconds))
        return True


BACKEND = YugabyteDB()

"""YugabyteDB by the dialect name ``yugabytedb``; ``postgresql://`` URLs to it work as well.

The difference is in the server: the migration reads ``version()`` and installs function bodies that lock rows of
``lock.locked_keys``. Clients send PostgreSQL's statements, except for the queue of a semaphore's waiters: it is a lock
of such a row, since YugabyteDB's advisory locks are recent, and off by default.
"""

from __future__ import annotations

from sqlalchemy.engine import Connection

from sqlalchemy_locks.dialects.postgresql import PostgreSQL, join_by_row


class YugabyteDB(PostgreSQL):
    name = "YugabyteDB"
    supports_listen = False
    held_keys = None
    holders_unavailable = "whose locks are row locks, which no table of the server lists"

    def join_queue(self, connection: Connection, key: int, seconds: float) -> bool:
        join_by_row(connection, key, self.wait_value(seconds))
        return True


BACKEND = YugabyteDB()

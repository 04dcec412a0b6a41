"""YugabyteDB by the dialect name ``yugabytedb``; ``postgresql://`` URLs to it work as well.

The difference is in the server: the migration reads ``version()`` and installs function bodies that lock rows of
``lock.locked_keys``. Clients send PostgreSQL's statements; waiters for permits poll, since YugabyteDB's advisory locks
are recent, and serve nobody in turn.
"""

from __future__ import annotations

from sqlalchemy_locks.dialects.postgresql import PostgreSQL


class YugabyteDB(PostgreSQL):
    name = "YugabyteDB"
    supports_listen = False
    shortest_queue_wait = None


BACKEND = YugabyteDB()

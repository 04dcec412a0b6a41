"""YugabyteDB through the ``yugabytedb`` dialect name; ``postgresql://`` URLs to it work as well.

What differs, differs on the server: the migration reads ``version()`` there and installs the bodies that
lock rows of ``lock.locked_keys``. The statements that a client sends are PostgreSQL's.
"""

from __future__ import annotations

from .postgresql import PostgreSQL


class YugabyteDB(PostgreSQL):
    name = "YugabyteDB"
    listens = False
    held_keys = None
    untold = "whose locks are row locks, which no table of the server's lists"
    lines = False


ENGINE = YugabyteDB()

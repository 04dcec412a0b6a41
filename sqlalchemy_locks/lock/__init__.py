"""Advisory-style locks: any value can be locked, exclusively or shared, until the transaction ends.

The pattern: exclusive and shared locks on arbitrary values, as functions over a table of keys
(``lock.exclusive``, ``lock.shared``, ``lock.unlock``, ``lock.vacuum``), with its races mended.

What is promised: two transactions never hold a key exclusively at once, nor one exclusively and another
shared; ``try_*`` never waits, whatever others have not committed yet; a lock ends with its transaction, its
connection or its process, whichever ends first.

- *PostgreSQL, YugabyteDB*: one call of the functions that the migration installs.
- *MySQL, MariaDB*: the row of the key in a table (``lock/innodb.py``), made on its first use.
- *SQLite*: any lock is the database's one write lock.
"""

from sqlalchemy_locks.lock.advisory import (
    create,
    exclusive,
    holders,
    key,
    row,
    session_exclusive,
    session_unlock,
    shared,
    try_exclusive,
    try_shared,
    unlock,
    vacuum,
)

__all__ = [
    "create",
    "exclusive",
    "holders",
    "key",
    "row",
    "session_exclusive",
    "session_unlock",
    "shared",
    "try_exclusive",
    "try_shared",
    "unlock",
    "vacuum",
]

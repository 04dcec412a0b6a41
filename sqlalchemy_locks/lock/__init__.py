"""Advisory locks: lock any value, exclusively or shared, until the transaction ends.

Guarantees: two transactions never hold a key exclusively at the same time, nor one exclusively and another shared;
``try_*`` never waits, whatever other transactions have not committed yet; a lock ends with its transaction, its
connection or its process, whichever ends first.

- *PostgreSQL, YugabyteDB*: one call of a function that the migration installs (``key_lock.py``).
- *MySQL, MariaDB*: the key's row in a table (``innodb.py``), inserted on first use.
- *SQLite*: every lock is the database's one write lock (``write_lock.py``).
"""

from sqlalchemy_locks.keys import key
from sqlalchemy_locks.lock.key_holders import holders
from sqlalchemy_locks.lock.key_lock import create, exclusive, shared, try_exclusive, try_shared, unlock, vacuum
from sqlalchemy_locks.lock.row_lock import row
from sqlalchemy_locks.lock.session_lock import session_exclusive, session_unlock

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

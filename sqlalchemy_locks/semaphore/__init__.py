"""A counting semaphore in the database: a number of permits, held by processes on any machine.

A request acquires permits of one or more semaphores, all or none. Its id makes it repeatable. It may have a time to
live, which can be renewed. Grants have fencing tokens, and sweeps release abandoned permits.

Guarantees:

- No grant makes the held permits exceed the capacity of that moment, at any isolation level. The one exception is READ
  UNCOMMITTED that is set for one transaction only, since the server's variables don't show it.
- One id is granted once, and a permit is released once.
- A fencing token is greater than every earlier token of its semaphore, even after the semaphore was deleted and created
  again.
"""

from __future__ import annotations

from sqlalchemy_locks.semaphore.acquire import acquire
from sqlalchemy_locks.semaphore.admin import create, delete, resize
from sqlalchemy_locks.semaphore.guarded import guarded
from sqlalchemy_locks.semaphore.monitoring import history, holders, usage
from sqlalchemy_locks.semaphore.release import release
from sqlalchemy_locks.semaphore.renew import renew
from sqlalchemy_locks.semaphore.sweep import clean, clean_history, clean_leases, sweep

__all__ = [
    "acquire",
    "clean",
    "clean_history",
    "clean_leases",
    "create",
    "delete",
    "guarded",
    "history",
    "holders",
    "release",
    "renew",
    "resize",
    "sweep",
    "usage",
]

"""A counting semaphore in the database: a number of permits, held by processes on any machine.

Permits of several semaphores at once, all or none;
an id that makes each request repeatable; a time to live, renewed or not; fencing tokens; sweeps.

What is promised: what is held never exceeds the capacity that was in force when it was granted, at any isolation
level, except READ UNCOMMITTED set for one transaction only, which the server's variables don't show; one id is granted
once; a permit is released once; each grant's fencing token is greater than any that its semaphore granted before,
deleted and created again or not.
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

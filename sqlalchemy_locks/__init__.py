"""Distributed locks, counting semaphores and captures of work as SQLAlchemy constructs.

>>> import sqlalchemy_locks as sl
"""

from . import lock, sqlite
from .aio import AsyncLocks
from .errors import (
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotInstalled,
    NotWritable,
    ReentryError,
    StaleSnapshot,
    UnknownRow,
    Unsupported,
)
from .locks import Locks
from .metadata import metadata
from .operation import Operation

__all__ = [
    "AsyncLocks",
    "LockError",
    "LockLost",
    "LockTimeout",
    "Locks",
    "MustRollback",
    "NotInstalled",
    "NotWritable",
    "Operation",
    "ReentryError",
    "StaleSnapshot",
    "UnknownRow",
    "Unsupported",
    "lock",
    "metadata",
    "sqlite",
]

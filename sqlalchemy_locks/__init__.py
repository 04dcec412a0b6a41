"""Distributed locks, counting semaphores and captures of work as SQLAlchemy constructs.

>>> import sqlalchemy_locks as sl
"""

from typing import TYPE_CHECKING, Any

from . import lock, sqlite
from .errors import (
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotInstalled,
    NotWritable,
    OutcomeUnknown,
    ReentryError,
    StaleSnapshot,
    UnknownRow,
    Unsupported,
)
from .locks import Locks
from .metadata import metadata
from .operation import Operation

if TYPE_CHECKING:
    from .aio import AsyncLocks

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
    "OutcomeUnknown",
    "ReentryError",
    "StaleSnapshot",
    "UnknownRow",
    "Unsupported",
    "lock",
    "metadata",
    "sqlite",
]


def __getattr__(name: str) -> Any:
    # SQLAlchemy's asyncio extension is loaded by who uses it, as SQLAlchemy itself has it
    if name == "AsyncLocks":
        from .aio import AsyncLocks

        return AsyncLocks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

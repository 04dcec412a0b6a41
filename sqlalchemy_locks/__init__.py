"""Distributed locks, counting semaphores and captures of work as SQLAlchemy constructs.

>>> import sqlalchemy_locks as sl
"""

from typing import TYPE_CHECKING, Any

from . import lock, semaphore, sqlite
from .errors import (
    IdempotencyConflict,
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotInstalled,
    NotWritable,
    OutcomeUnknown,
    ReentryError,
    SemaphoreHeld,
    StaleSnapshot,
    StaleToken,
    UnknownRow,
    UnknownSemaphore,
    UnknownTask,
    Unsupported,
)
from .fencing import Fence, fenced
from .locks import Locks
from .metadata import metadata
from .mutex import Mutex
from .operation import Operation
from .semaphore import guarded
from .timeout import Timeout
from .values import Grant, Released, Report

if TYPE_CHECKING:
    from .aio import AsyncLocks

__all__ = [
    "AsyncLocks",
    "Fence",
    "Grant",
    "IdempotencyConflict",
    "LockError",
    "LockLost",
    "LockTimeout",
    "Locks",
    "MustRollback",
    "Mutex",
    "NotInstalled",
    "NotWritable",
    "Operation",
    "OutcomeUnknown",
    "ReentryError",
    "Released",
    "Report",
    "SemaphoreHeld",
    "StaleSnapshot",
    "StaleToken",
    "Timeout",
    "UnknownRow",
    "UnknownSemaphore",
    "UnknownTask",
    "Unsupported",
    "fenced",
    "guarded",
    "lock",
    "metadata",
    "semaphore",
    "sqlite",
]


def __getattr__(name: str) -> Any:
    # SQLAlchemy's asyncio extension is loaded by who uses it, as SQLAlchemy itself has it
    if name == "AsyncLocks":
        from .aio import AsyncLocks

        return AsyncLocks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

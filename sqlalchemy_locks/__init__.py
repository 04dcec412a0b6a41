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
    StaleToken,
    UnknownRow,
    UnknownTask,
    Unsupported,
)
from .fencing import Fence, fenced
from .locks import Locks
from .metadata import metadata
from .mutex import Mutex
from .operation import Operation
from .timeout import Timeout

if TYPE_CHECKING:
    from .aio import AsyncLocks

__all__ = [
    "AsyncLocks",
    "Fence",
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
    "StaleSnapshot",
    "StaleToken",
    "Timeout",
    "UnknownRow",
    "UnknownTask",
    "Unsupported",
    "fenced",
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

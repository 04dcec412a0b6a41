"""Distributed locks, counting semaphores and captures of work as SQLAlchemy constructs.

>>> import sqlalchemy_locks as sl
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import lock, semaphore, sqlite
from .capture import capture
from .errors import (
    IdempotencyConflict,
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotInstalled,
    NotWritable,
    OutcomeUnknown,
    PoolTimeout,
    ReentryError,
    RequestHeld,
    RequestOver,
    SemaphoreHeld,
    StaleSnapshot,
    StaleToken,
    UnknownRow,
    UnknownSemaphore,
    UnknownTask,
    Unsupported,
)
from .explain import Explanation, explain
from .fencing import Fence, fenced
from .lease import Lease
from .locks import Locks
from .metadata import metadata
from .mutex import Mutex
from .operation import Operation
from .queue import Queue
from .semaphore import guarded
from .timeout import Timeout
from .transition import StateTransition
from .values import Grant, Holder, KeyHolder, KeyWaiter, LockEvent, PermitHolder, Released, Report

if TYPE_CHECKING:
    from .aio import AsyncLocks
    from .async_lease import AsyncLease
    from .async_worker import AsyncWorker
    from .mapped import JobColumns
    from .worker import Worker

__all__ = [
    "AsyncLease",
    "AsyncLocks",
    "AsyncWorker",
    "Explanation",
    "Fence",
    "Grant",
    "Holder",
    "IdempotencyConflict",
    "JobColumns",
    "KeyHolder",
    "KeyWaiter",
    "Lease",
    "LockError",
    "LockEvent",
    "LockLost",
    "LockTimeout",
    "Locks",
    "MustRollback",
    "Mutex",
    "NotInstalled",
    "NotWritable",
    "Operation",
    "OutcomeUnknown",
    "PermitHolder",
    "PoolTimeout",
    "Queue",
    "ReentryError",
    "Released",
    "Report",
    "RequestHeld",
    "RequestOver",
    "SemaphoreHeld",
    "StaleSnapshot",
    "StaleToken",
    "StateTransition",
    "Timeout",
    "UnknownRow",
    "UnknownSemaphore",
    "UnknownTask",
    "Unsupported",
    "Worker",
    "capture",
    "explain",
    "fenced",
    "guarded",
    "lock",
    "metadata",
    "semaphore",
    "sqlite",
]


_LATER = {
    "AsyncLease": ".async_lease",
    "AsyncLocks": ".aio",
    "AsyncWorker": ".async_worker",
    "JobColumns": ".mapped",
    "Worker": ".worker",
}


def __getattr__(name: str) -> Any:
    # SQLAlchemy's ORM and its asyncio extension are loaded by who uses them, as SQLAlchemy itself has it
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

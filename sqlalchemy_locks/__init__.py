"""Distributed locks, counting semaphores and captures of work as SQLAlchemy constructs.

>>> import sqlalchemy_locks as sl
"""

import importlib
from typing import TYPE_CHECKING, Any

from sqlalchemy_locks import lock, semaphore, sqlite
from sqlalchemy_locks.admin.metadata import metadata
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.errors import (
    Discard,
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
    Retry,
    SemaphoreHeld,
    StaleSnapshot,
    StaleToken,
    UnknownRow,
    UnknownSemaphore,
    UnknownTask,
    Unsupported,
)
from sqlalchemy_locks.facade.lease import Lease
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.fencing import Fence, fenced
from sqlalchemy_locks.semaphore import guarded
from sqlalchemy_locks.values import (
    Grant,
    Holder,
    JobEvent,
    KeyHolder,
    KeyWaiter,
    LockEvent,
    PermitHolder,
    Released,
    Report,
)

if TYPE_CHECKING:
    from sqlalchemy_locks.captures.row_capture import capture
    from sqlalchemy_locks.captures.state_transition import StateTransition
    from sqlalchemy_locks.facade.async_lease import AsyncLease
    from sqlalchemy_locks.facade.async_locks import AsyncLocks
    from sqlalchemy_locks.queue.mixin import JobColumns, WorkerColumns
    from sqlalchemy_locks.queue.queue import Queue
    from sqlalchemy_locks.workers.asynchronous import AsyncWorker
    from sqlalchemy_locks.workers.running_job import RunningJob
    from sqlalchemy_locks.workers.threaded import Worker

__all__ = [
    "AsyncLease",
    "AsyncLocks",
    "AsyncWorker",
    "Discard",
    "Fence",
    "Grant",
    "Holder",
    "IdempotencyConflict",
    "JobColumns",
    "JobEvent",
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
    "Retry",
    "RunningJob",
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
    "WorkerColumns",
    "capture",
    "fenced",
    "guarded",
    "lock",
    "metadata",
    "semaphore",
    "sqlite",
]

_LAZY = {
    "AsyncLease": ".facade.async_lease",
    "AsyncLocks": ".facade.async_locks",
    "AsyncWorker": ".workers.asynchronous",
    "JobColumns": ".queue.mixin",
    "WorkerColumns": ".queue.mixin",
    "Queue": ".queue.queue",
    "RunningJob": ".workers.running_job",
    "StateTransition": ".captures.state_transition",
    "Worker": ".workers.threaded",
    "capture": ".captures.row_capture",
}


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        # SQLAlchemy's ORM and its asyncio extension are loaded on first use, as SQLAlchemy itself does
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name], __name__), name)
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("sqlalchemy-locks")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

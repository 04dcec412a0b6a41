"""Three of the patterns without SQL: ``Mutex``, ``Timeout`` and ``StateTransition`` on a Redis server.

>>> import redis
>>> from sqlalchemy_locks.redis import Mutex
>>> mutex = Mutex(redis.Redis())

With ``redis.asyncio.Redis`` every call is awaited; everything else is the same.
"""

from typing import Any

from sqlalchemy_locks.errors import Unsupported

try:
    from sqlalchemy_locks.redis.mutex import Held, Mutex
    from sqlalchemy_locks.redis.timeout import Listed, Timeout
    from sqlalchemy_locks.redis.transition import StateTransition, Task
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "redis":
        raise
    raise ModuleNotFoundError(
        "sqlalchemy_locks.redis needs redis-py: pip install 'sqlalchemy-locks[redis]'", name="redis"
    ) from error

__all__ = ["Held", "Listed", "Mutex", "StateTransition", "Task", "Timeout"]

_TRANSACTION = "Redis takes no part in your database's transactions, so it can't hold a lock until one ends"
_FENCE = "Redis doesn't see writes to your database, so it can't refuse those of a late holder"
_REFUSED = {
    "lock": f"{_TRANSACTION}: use sqlalchemy_locks.lock, or redis.Mutex, which has no expiry",
    "Locks": f"{_TRANSACTION}: use sqlalchemy_locks.Locks on an Engine",
    "AsyncLocks": f"{_TRANSACTION}: use sqlalchemy_locks.AsyncLocks on an AsyncEngine",
    "fenced": f"{_FENCE}: compare the token of acquire_token() in your own UPDATE, which sqlalchemy_locks.fenced does",
    "guarded": f"{_FENCE}: use a semaphore in the database that is written to",
    "semaphore": f"{_TRANSACTION}: semaphores are for SQL databases, where a crash can't undo half of a grant",
    "Queue": f"{_TRANSACTION}: use sqlalchemy_locks.Queue, or redis.StateTransition for the bare capture",
    "Worker": f"{_TRANSACTION}: use sqlalchemy_locks.Worker, or redis.StateTransition for the bare capture",
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise Unsupported(f"there is no sqlalchemy_locks.redis.{name}: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

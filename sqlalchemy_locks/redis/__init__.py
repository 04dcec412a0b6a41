"""The same three locks where there is no SQL: ``Mutex``, ``Timeout`` and ``StateTransition`` on a Redis server.

>>> import redis
>>> from sqlalchemy_locks.redis import Mutex
>>> mutex = Mutex(redis.Redis())

With ``redis.asyncio.Redis`` every call is awaited, and that is the whole difference.
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

_TRANSACTION = "Redis takes no part in a transaction of your database, so nothing can be held until that ends"
_FENCE = "Redis can't see what is written to your database, so it can't keep a late holder from writing"
_REFUSED = {
    "lock": f"{_TRANSACTION}: use sqlalchemy_locks.lock, or redis.Mutex, which is held until it is released",
    "Locks": f"{_TRANSACTION}: use sqlalchemy_locks.Locks on an Engine",
    "AsyncLocks": f"{_TRANSACTION}: use sqlalchemy_locks.AsyncLocks on an AsyncEngine",
    "fenced": f"{_FENCE}: compare the token of acquire_token() in your own UPDATE, which sqlalchemy_locks.fenced does",
    "guarded": f"{_FENCE}: use a semaphore in the database that is written to",
    "semaphore": f"{_TRANSACTION}: semaphores are for SQL databases, where a crash can't half undo a grant",
    "Queue": f"{_TRANSACTION}: use sqlalchemy_locks.Queue, or redis.StateTransition for the bare capture",
    "Worker": f"{_TRANSACTION}: use sqlalchemy_locks.Worker, or redis.StateTransition for the bare capture",
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise Unsupported(f"there is no sqlalchemy_locks.redis.{name}: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

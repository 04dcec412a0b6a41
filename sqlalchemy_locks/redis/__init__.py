"""Three of the patterns without SQL: ``Mutex``, ``Timeout`` and ``StateTransition`` on a Redis server.

>>> import redis
>>> from sqlalchemy_locks.redis import Mutex
>>> mutex = Mutex(redis.Redis())

With ``redis.asyncio.Redis`` every call is awaited; everything else is the same.
"""

from typing import Any

from sqlalchemy_locks.errors import Unsupported

try:
    from sqlalchemy_locks.redis.mutex import Mutex
    from sqlalchemy_locks.redis.timeout import Timeout
    from sqlalchemy_locks.redis.transition import StateTransition, Task
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "redis":
        raise
    raise ModuleNotFoundError(
        "sqlalchemy_locks.redis needs redis-py: pip install 'sqlalchemy-locks[redis]'", name="redis"
    ) from error

__all__ = ["Mutex", "StateTransition", "Task", "Timeout"]

_SQL_ONLY = ("lock", "Locks", "AsyncLocks", "fenced", "guarded", "semaphore", "Queue", "Worker")


def __getattr__(name: str) -> Any:
    if name in _SQL_ONLY:
        raise Unsupported(
            f"there is no sqlalchemy_locks.redis.{name}: Redis takes no part in your database's transactions, and "
            f"doesn't see its writes; use sqlalchemy_locks.{name}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

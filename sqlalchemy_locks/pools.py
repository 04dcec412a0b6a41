"""How many connections a pool gives, and whether two who ask get two."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool


def most(pool: Any) -> float:
    """The most connections that a pool has out at once; endless where it sets no limit."""
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return math.inf
    return pool.size() + pool._max_overflow


def one_for_all(pool: Any) -> bool:
    """Whether who asks again, while the first one is out, is given the same connection, and so the same transaction."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


@contextlib.contextmanager
def unattended(engine: Engine) -> Iterator[None]:
    """Work inside is waited for by nobody, who may dispose of the engine meanwhile: no connection outlives that.

    What is given back after it goes to the pool that the engine had, and would stay open until somebody collects it.
    """
    pool, process = engine.pool, os.getpid()
    try:
        yield
    finally:
        # a fork's are its parent's connections, and not its to close
        if engine.pool is not pool and os.getpid() == process:
            pool.dispose()

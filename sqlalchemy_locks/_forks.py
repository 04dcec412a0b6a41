"""Forks: a child never shares a connection with its parent, because both processes would hold its locks."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

#: the engines whose connections a forked process must not share
_engines: WeakSet[Engine] = WeakSet()
#: The pools of parent processes. Closing them would end the parent's sockets, make its event loop forget them, or, on
#: SQLite, delete a journal.
_inherited: list[Pool] = []


def in_forked_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Call a function in every process that is forked from now on; a decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)
    return reset


def replace_pool_in_forks(engine: Engine) -> None:
    """Replace the engine's pool in every process that is forked from now on."""
    _engines.add(engine)


def replace_pool(engine: Engine) -> None:
    """Replace the pool of an engine in a forked process; the parent's connections stay open."""
    # a database in memory exists on the only connection of such a pool
    if not shares_one_connection(engine.pool):
        _inherited.append(engine.pool)
        engine.dispose(close=False)


def shares_one_connection(pool: Pool) -> bool:
    """Return whether the pool shares one connection, and so one transaction, between checkouts."""
    return isinstance(pool, (StaticPool, SingletonThreadPool))


@in_forked_child
def _replace_pools() -> None:
    for engine in list(_engines):
        replace_pool(engine)

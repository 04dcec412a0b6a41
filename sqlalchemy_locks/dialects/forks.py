"""What a forked process must not share with its parent: the connections of an engine, and a SQLite file.

On one connection two processes would hold the same lock. And SQLite counts the locks of a file by process: a child that
has inherited an open connection to it, and opens another one, believes that it holds locks which only its parent holds.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.pool import NullPool

from sqlalchemy_locks.dialects.connections import close_idle_connections, is_in_memory, shares_one_connection

#: engines that a forked process must not share connections of
_engines: WeakSet[Engine] = WeakSet()
#: the pools of parents: where their connections were collected as garbage, asyncio's event loop, whose selector both
#: processes share, would forget the parent's sockets
_kept: list[Any] = []
#: device and inode of the files that were open when this process, or one that it descends from, was forked
_inherited: set[tuple[int, int]] = set()


def replace_pool_in_forks(engine: Engine) -> None:
    """Replace the engine's pool in every process that is forked from now on."""
    _engines.add(engine)


def replace_pool(engine: Engine) -> None:
    """Replace the pool of an engine in a forked process; the parent's connections stay open."""
    if not (isinstance(engine.pool, NullPool) or shares_one_connection(engine.pool)):
        _kept.append(engine.pool)
        engine.dispose(close=False)


def forked() -> bool:
    """Return whether this process has inherited open files."""
    return bool(_inherited)


def is_inherited(path: str) -> bool:
    """Return whether a file was open when this process was forked.

    That it is closed now changes nothing: what SQLite believes to hold of it stays in the memory of this process, which
    may have closed the descriptor without SQLite (as a daemon does), and even have it for another file.
    """
    try:
        file = os.stat(path)
    except OSError:
        return False  # it was deleted
    return (file.st_dev, file.st_ino) in _inherited


def _open_files(folder: str) -> Iterator[tuple[int, int]]:
    """Yield device and inode of each regular file that is open."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            status = os.fstat(int(name))
            if stat.S_ISREG(status.st_mode):
                yield status.st_dev, status.st_ino


def _close_files() -> None:
    """Close the idle connections to files before a fork, where that needs no event loop; they are opened again."""
    for engine in list(_engines):
        dialect, pool = engine.dialect, cast(Any, engine.pool)
        with contextlib.suppress(Exception):
            if dialect.name == "sqlite" and not (dialect.is_async or is_in_memory(engine.url) or pool.checkedout()):
                close_idle_connections(pool)


def _after_fork() -> None:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            _inherited.update(_open_files(folder))
            break
    for engine in list(_engines):
        with contextlib.suppress(Exception):
            replace_pool(engine)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_close_files, after_in_child=_after_fork)

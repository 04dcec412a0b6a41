"""The pytest plugin, which the extra ``testing`` installs: fixtures for the tests of an app.

Override ``locks_engine``, or ``async_locks_engine``, in your ``conftest.py`` by an engine of yours, with the tables
installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine

from sqlalchemy_locks.admin.metadata import metadata
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.testing.clock import Clock

if TYPE_CHECKING:  # needs greenlet, which an app without an async driver doesn't have
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlalchemy_locks.facade.async_locks import AsyncLocks

_OWNER = "another process"


@pytest.fixture
def locks_engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine with the tables installed: an SQLite file, unless it is overridden."""
    engine = create_engine(f"sqlite:///{tmp_path / 'locks.db'}")
    metadata().create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def locks(locks_engine: Engine) -> Locks:
    """``Locks`` on ``locks_engine``."""
    return Locks(locks_engine)


@pytest.fixture
def another_process(locks_engine: Engine) -> Iterator[Locks]:
    """``Locks`` of another owner, on another engine for the same database, as another process would have them."""
    engine = create_engine(locks_engine.url, execution_options=locks_engine.get_execution_options())
    yield Locks(engine, owner=_OWNER)
    engine.dispose()


@pytest.fixture
def two_connections(locks_engine: Engine) -> Iterator[tuple[Connection, Connection]]:
    """Two connections of ``locks_engine``, as two processes of the app have them; rolled back at the end."""
    with locks_engine.connect() as one, locks_engine.connect() as other:
        yield one, other


@pytest.fixture
def locks_clock(locks_engine: Engine) -> Clock[Engine]:
    """A :class:`Clock` to move."""
    return Clock(locks_engine)


@pytest.fixture
def async_locks_engine(tmp_path: Path) -> AsyncEngine:
    """As ``locks_engine``, on the same file; without a pool, so that no event loop has to dispose of it."""
    from sqlalchemy.ext.asyncio import create_async_engine

    url = f"sqlite:///{tmp_path / 'locks.db'}"
    engine = create_engine(url, poolclass=NullPool)
    metadata().create_all(engine)
    return create_async_engine(url.replace("sqlite", "sqlite+aiosqlite", 1), poolclass=NullPool)


@pytest.fixture
def async_locks(async_locks_engine: AsyncEngine) -> AsyncLocks:
    """``AsyncLocks`` on ``async_locks_engine``."""
    from sqlalchemy_locks.facade.async_locks import AsyncLocks

    return AsyncLocks(async_locks_engine)


@pytest.fixture
def async_another_process(async_locks_engine: AsyncEngine) -> AsyncLocks:
    """As ``another_process``, for an async app."""
    from sqlalchemy.ext.asyncio import create_async_engine

    from sqlalchemy_locks.facade.async_locks import AsyncLocks

    options = async_locks_engine.get_execution_options()
    engine = create_async_engine(async_locks_engine.url, poolclass=NullPool, execution_options=options)
    return AsyncLocks(engine, owner=_OWNER)


@pytest.fixture
def async_locks_clock(async_locks_engine: AsyncEngine) -> Clock[AsyncEngine]:
    """As ``locks_clock``; its ``advance`` is awaited."""
    return Clock(async_locks_engine)

"""The pytest plugin, which the extra ``testing`` installs: fixtures for the tests of an app.

Override ``locks_engine`` in your ``conftest.py`` by an engine of yours, with the tables installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine

from sqlalchemy_locks.admin.metadata import metadata
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.testing.clock import Clock


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
def two_connections(locks_engine: Engine) -> Iterator[tuple[Connection, Connection]]:
    """Two connections of ``locks_engine``, as two processes of the app have them; rolled back at the end."""
    with locks_engine.connect() as one, locks_engine.connect() as other:
        yield one, other


@pytest.fixture
def locks_clock(locks_engine: Engine) -> Clock:
    """A :class:`Clock` to move."""
    return Clock(locks_engine)

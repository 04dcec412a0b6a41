"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool

from tests.fixtures.engines import watch
from tests.fixtures.parties import connected, installed, unused

__all__ = ["engine", "id", "watch"]


@pytest.fixture
def engine(servers: Any, name: str) -> Iterator[Engine]:
    """An engine for the database that the test names, without a proxy."""
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        yield engine


@pytest.fixture
def id() -> str:
    """The id of a mutex or timeout that no other test uses."""
    return unused()

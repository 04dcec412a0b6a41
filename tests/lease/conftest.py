"""The fixtures of this folder."""

import threading
from collections.abc import Iterator

import pytest

from tests.operation import fixtures
from tests.operation.fixtures import MakeEngine, never_cut, unhurried, watch
from tests.operation.parties import until

__all__ = ["engine_to", "never_cut", "unhurried", "watch"]

_engine_to = fixtures.engine_to


def renewing() -> bool:
    return any(thread.name == "sqlalchemy_locks.renewal" for thread in threading.enumerate())


@pytest.fixture
def engine_to(_engine_to: MakeEngine) -> Iterator[MakeEngine]:
    """As everywhere; and no engine is disposed of while a renewal has a connection of it."""
    yield _engine_to
    until(lambda: not renewing())

"""The fixtures of this folder."""

from collections.abc import Iterator

import pytest

from tests.operation import fixtures
from tests.operation.fixtures import MakeEngine, never_cut, unhurried, watch
from tests.operation.parties import until

from .parties import renewers

__all__ = ["engine_to", "never_cut", "unhurried", "watch"]

_engine_to = fixtures.engine_to


@pytest.fixture
def engine_to(_engine_to: MakeEngine) -> Iterator[MakeEngine]:
    """As everywhere; and no engine is disposed of while a renewal has a connection of it."""
    yield _engine_to
    until(lambda: not renewers())

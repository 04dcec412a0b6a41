"""The fixtures of this folder."""

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from tests.fixtures.engines import engine, engine_to, watch
from tests.fixtures.semaphores import made

__all__ = ["engine", "engine_to", "watch"]


@pytest.fixture
def locks(engine: Engine) -> sl.Locks:
    return sl.Locks(engine)


@pytest.fixture
def sem(engine: Engine) -> str:
    """A semaphore of one permit."""
    return made(engine, 1)

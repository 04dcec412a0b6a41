"""The fixtures of this folder."""

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from tests.fixtures.engines import engine, engine_to, watch

__all__ = ["engine", "engine_to", "watch"]


@pytest.fixture
def locks(engine: Engine) -> sl.Locks:
    return sl.Locks(engine)

"""PostgreSQL grants advisory locks in FIFO order: a stream of readers doesn't starve a writer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, later, unused

NAMES = ["postgresql15", "postgresql18"]


@pytest.mark.parametrize("name", NAMES)
def test_readers_queue_behind_a_waiting_writer(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str) -> None:
    engine, key, watched = engine_to(name), unused(), watch(name)
    order: list[str] = []

    def take(what: str, operation: sl.Operation) -> None:
        with engine.begin() as connection:
            connection.execute(operation)
            order.append(what)

    with engine.connect() as holder:
        holder.execute(sl.lock.shared(key))
        writing = later(take, "writer", sl.lock.exclusive(key))
        watched.until_waiting(writing)
        reading = later(take, "reader", sl.lock.shared(key))
        watched.until_waiting(reading, besides=1)
        with engine.connect() as other:
            assert other.scalar(sl.lock.try_shared(key)) is False  # a try doesn't overtake it either
    writing.result(PATIENCE)
    reading.result(PATIENCE)
    assert order == ["writer", "reader"]

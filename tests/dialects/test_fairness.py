"""PostgreSQL grants advisory locks in FIFO order: a stream of readers doesn't starve a writer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, later, until, unused

NAMES = ["postgresql15", "postgresql18"]
READERS = 4


@pytest.mark.parametrize("name", NAMES)
def test_readers_do_not_starve_a_writer(engine_to: MakeEngine, watch: Callable[[str], Watch], name: str) -> None:
    engine, key = engine_to(name), unused()
    changed = threading.Condition()
    done = threading.Event()
    entered = [0]

    def reader() -> int:
        """Share the key repeatedly, if possible releasing it only after the next reader has acquired it."""
        count = 0
        while not done.is_set():
            with engine.begin() as connection:
                connection.execute(sl.lock.shared(key))
                count += 1
                with changed:
                    entered[0] += 1
                    mine = entered[0]
                    changed.notify_all()
                    changed.wait_for(lambda mine=mine: entered[0] > mine, timeout=0.05)
        return count

    def writer() -> int:
        with engine.begin() as connection:
            connection.execute(sl.lock.exclusive(key))
            return entered[0]

    with engine.connect() as holder:
        holder.execute(sl.lock.shared(key))
        readers = [later(reader) for _ in range(READERS)]
        until(lambda: entered[0] > READERS)
        writing = later(writer)
        watch(name).until_waiting(writing)
    try:
        before = writing.result(PATIENCE)
        until(lambda: entered[0] > before + READERS)  # and readers that came after it
    finally:
        done.set()
    assert all(reader.result(PATIENCE) for reader in readers)


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

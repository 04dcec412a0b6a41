"""Where the next fetch searches from: the head, or the position where the last one ended."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Engine

from sqlalchemy_locks.workers.fetch_cursor import FetchCursor
from tests.conditional.test_lost_replies import final, in_the_clear
from tests.fixtures.queues import MakeEngine, put
from tests.fixtures.worker_states import counts, finish_all, state_of


def test_a_slow_search_sets_the_position() -> None:
    cursor, last = FetchCursor(True, 3600), (0, None, 7)
    assert cursor.after() is None
    cursor.advance(None, last, 360)
    assert cursor.after() == last
    cursor.advance(last, (0, None, 9), 0.0)
    assert cursor.after() == (0, None, 9)
    cursor.advance(last, None, 0.0)  # no more jobs: from the head
    assert cursor.after() is None
    cursor.advance(None, last, 0.0)
    assert cursor.after() is None
    capped = FetchCursor(True, 1)
    capped.advance(None, last, 360)
    assert capped._expires <= time.monotonic() + 1
    cheap = FetchCursor(False, 3600)
    cheap.advance(None, last, 360)
    assert cheap.after() is None


def test_the_head_is_searched_within_a_second(engine_to: MakeEngine) -> None:
    """The search may only have waited for a lock or a connection."""
    state = state_of(engine_to("postgresql15"), heartbeat=3600)
    state.cursor.advance(None, (0, None, 7), 360)
    assert state.cursor._position is not None
    assert state.cursor._expires <= time.monotonic() + 1


@pytest.mark.parametrize(("name", "driver"), [("postgresql15", "psycopg"), ("postgresql15", "psycopg2")])
def test_a_retried_fetch_does_not_count_as_slow(servers: Any, direct: Engine, name: str, driver: str) -> None:
    put(direct, *range(6))
    with in_the_clear(servers, name, driver) as (engine, proxy):
        state = state_of(engine, batch=2)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
        proxy.lose_answer(final(name), lambda: time.sleep(0.1))
        asked = time.monotonic()
        state.cycle()
        assert (proxy.losses, time.monotonic() - asked >= 0.1) == (1, True)
        assert state.cursor.after() is None


def test_jobs_before_the_position_are_fetched_later(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4))
    state = state_of(engine, batch=2, heartbeat=3600)
    state.cycle()
    assert finish_all(state) == [0, 1]
    state.cursor._expires = time.monotonic() + 3600  # as after a slow search
    put(engine, "urgent", priority=-1)
    state.cycle()
    assert finish_all(state) == [2, 3]
    # there is no job after the position, so the next search is from the head, and due immediately
    state.cycle()
    assert state.pause() == 0
    state.cycle()
    assert finish_all(state) == ["urgent"]
    state.cycle()
    assert counts(engine)["completed"] == 5

"""Any input is refused with a ValueError or TypeError before SQL, or stored unchanged: never a server's error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES

SETTINGS = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
#: values that databases often reject, in addition to those that Hypothesis draws
ODD = [
    "",
    " ",
    "a ",
    "\0",
    "\ud800",
    "é",
    "e\u0301",
    "\U0001f512",
    "'; --",
    "%s",
    ":x",
    "\\",
    "a" * 255,
    "a" * 256,
    "ß" * 255,
]
TEXTS = st.sampled_from(ODD) | st.text(st.characters(), max_size=260)
ANYTHING = TEXTS | st.integers() | st.none() | st.booleans() | st.floats() | st.binary(max_size=9)
#: values that every engine's JSON stores unchanged: floats that are written exactly, integers of 64 bits
PLAIN_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=260)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0.5, -1.25]) | PLAIN_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_numbers = itertools.count(1)


@pytest.fixture(params=[*ENGINES])
def engine(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Engine:
    return engine_to(request.param, ENGINES[request.param])


def refused(call: Callable[[], Any]) -> bool:
    """Whether a call refuses its input."""
    try:
        call()
    except (ValueError, TypeError):
        return True
    return False


def test_names(engine: Engine) -> None:
    locks = sl.Locks(engine)

    @SETTINGS
    @given(ANYTHING)
    def fuzz(name: Any) -> None:
        if refused(lambda: sl.Mutex().acquire(name, queue="fuzz")):
            return
        made = locks.run(sl.Mutex().create(name, queue="fuzz"))
        assert made in (0, 1)
        locks.run(sl.Mutex().acquire(name, queue="fuzz"))
        assert name in {row.id for row in locks.run(sl.Mutex().held(100_000))}
        assert locks.run(sl.Mutex().release(name, queue="fuzz")) is True

    fuzz()


def test_keys(engine: Engine) -> None:
    locks = sl.Locks(engine)

    @SETTINGS
    @given(ANYTHING)
    def fuzz(key: Any) -> None:
        if refused(lambda: sl.lock.exclusive(key)):
            assert refused(lambda: locks.exclusive(key))
            return
        with locks.exclusive(key, timeout=0) as held:
            held.check()

    fuzz()


def test_counts_and_durations(engine: Engine) -> None:
    locks = sl.Locks(engine)
    durations = st.none() | st.floats() | st.integers() | st.timedeltas()

    @SETTINGS
    @given(st.integers() | st.sampled_from([0, 1, 2**31 - 1, 2**31]), durations)
    def fuzz(count: int, ttl: float | timedelta | None) -> None:
        name = f"fuzz {next(_numbers)}"
        if refused(lambda: sl.semaphore.create(name, count)):
            return
        locks.run(sl.semaphore.create(name, count))
        if refused(lambda: sl.semaphore.acquire({name: 1}, ttl=ttl)):
            return
        grant = locks.run(sl.semaphore.acquire({name: 1}, ttl=ttl))
        assert grant.acquired is (count > 0)
        assert (grant.expires_at is None) is (ttl is None or not grant)

    fuzz()


def test_payloads(engine: Engine) -> None:
    locks, queue = sl.Locks(engine), sl.Queue()

    @SETTINGS
    @given(JSON)
    def fuzz(payload: Any) -> None:
        name = f"fuzz {next(_numbers)}"
        if refused(lambda: locks.run(queue.put(payload, queue=name))):
            return
        [job] = locks.run(queue.capture(1, queue=name))
        assert job.payload == payload
        assert locks.run(queue.complete(job)) == 1

    fuzz()


@pytest.mark.parametrize("payload", ["\0", "\ud800", float("nan")], ids=["NUL", "half a surrogate pair", "NaN"])
def test_payload_that_jsonb_refuses_is_refused_first(engine_to: MakeEngine, payload: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        sl.Locks(engine_to("postgresql15")).run(sl.Queue().put(payload, queue="fuzz"))

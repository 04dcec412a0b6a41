"""Invalid input raises before anything is sent; these tests have no server."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
from sqlalchemy import create_engine

import sqlalchemy_locks as sl
import sqlalchemy_locks.redis
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout

CLIENTS: list[Any] = [redis.Redis(port=1), redis.asyncio.Redis(port=1)]
PATTERNS: list[Any] = [Mutex, Timeout, StateTransition]
NO_NAMES: dict[str, tuple[Any, type[Exception]]] = {
    "empty": ("", ValueError),
    "too long": ("a" * 256, ValueError),
    "trailing space": ("a ", ValueError),
    "NUL": ("a\0b", ValueError),
    "surrogate": ("\ud800", ValueError),
    "None": (None, TypeError),
    "int": (1, TypeError),
    "True": (True, TypeError),
    "bytes": (b"a", TypeError),
    "list": (["a"], TypeError),
}


@pytest.fixture(params=CLIENTS, ids=["sync", "async"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(("value", "error"), NO_NAMES.values(), ids=NO_NAMES)
def test_invalid_names(client: Any, value: Any, error: type[Exception]) -> None:
    mutex, timeout, tasks = Mutex(client), Timeout(client, every=1), StateTransition(client)
    by_id = [mutex.create, mutex.acquire, mutex.acquire_token, mutex.release, timeout.create, timeout.acquire]
    by_id += [tasks.create, *(partial(pattern.set_retries, retries=1) for pattern in (mutex, timeout, tasks))]
    by_id += [partial(tasks.set_status, status="done")]
    calls = [lambda: Mutex(client, prefix=value), lambda: tasks.set_status("a", value)]
    calls += [partial(call, value) for call in by_id]
    if value is not None:
        calls += [partial(call, "a", queue=value) for call in by_id]
        calls += [partial(call, "a", owner=value) for call in (mutex.acquire, mutex.release)]
    for call in calls:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("kind", [Mutex, StateTransition])
def test_numbers(client: Any, kind: Any) -> None:
    pattern = kind(client)
    for call in (pattern.capture, lambda retries: pattern.create("a", retries=retries)):
        for wrong in (True, False, 1.0, "1", [1]):
            with pytest.raises(TypeError, match="is an int"):
                call(wrong)
        for wrong in (-1, 2**31):
            with pytest.raises(ValueError, match=r"is from [01] to 2147483647, not "):
                call(wrong)
    with pytest.raises(ValueError, match="limit is from 1 to 2147483647, not"):
        pattern.capture(0)
    with pytest.raises(ValueError, match="at least one id"):
        pattern.create()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((wrong, ValueError) for wrong in (0, -1, 0.5, math.nan, math.inf, timedelta(0), timedelta(milliseconds=1))),
        *((wrong, TypeError) for wrong in ("5m", "60", True, [60])),
    ],
)
def test_invalid_periods(client: Any, value: Any, error: type[Exception]) -> None:
    for call in (
        lambda: Timeout(client, every=value),
        lambda: Timeout(client).create("a", every=value),
        lambda: StateTransition(client).create("a", timeout=value),
    ):
        with pytest.raises(error, match="every|timeout"):
            call()


def test_invalid_zones_and_clocks(client: Any) -> None:
    with pytest.raises(ValueError, match="windowed=True"):
        Timeout(client, every=86400, tz="Europe/Paris")
    with pytest.raises(ValueError, match="no zone 'Europe/Lutetia'"):
        Timeout(client, every=86400, windowed=True, tz="Europe/Lutetia")
    for kind in (Timeout, StateTransition):
        with pytest.raises(TypeError, match="clock"):
            kind(client, clock=1_700_000_000)
    for wrong, error in (
        (datetime(2026, 1, 1), ValueError),
        (float("inf"), ValueError),
        ("now", TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match="the clock"):
            Timeout(client, every=1, clock=lambda wrong=wrong: wrong).acquire("a")
        with pytest.raises(error, match="the clock"):
            StateTransition(client, clock=lambda wrong=wrong: wrong).expire()


def test_statuses(client: Any) -> None:
    for wrong in ("done", 1, {"done"}):
        with pytest.raises(TypeError, match="ready"):
            StateTransition(client, ready=wrong)
    with pytest.raises(ValueError, match="at least one status"):
        StateTransition(client, ready=())
    for ready, captured in ((("done", "done"), "busy"), (("done", "busy"), "busy")):
        with pytest.raises(ValueError, match="same status twice"):
            StateTransition(client, ready=ready, captured=captured)
    tasks = StateTransition(client)
    for wrong in ("1", True, 1.0):
        with pytest.raises(TypeError, match="claim"):
            tasks.set_status("a", "done", claim=wrong)


@pytest.mark.parametrize("kind", PATTERNS, ids=lambda kind: kind.__name__)
def test_invalid_clients(kind: Any) -> None:
    for wrong in (None, "redis://localhost", create_engine("sqlite://"), redis.ConnectionPool()):
        with pytest.raises(TypeError, match=rf"redis\.{kind.__name__} takes a redis\.Redis"):
            kind(wrong)
    for client in CLIENTS:
        with pytest.raises(TypeError, match="pipeline"):
            kind(client.pipeline())


def test_two_prefixes_share_no_key(client: Any) -> None:
    """The queue "eu:mail" of one app would be the queue "mail" of the other."""
    assert Mutex(client, prefix="shop")._keys("eu:mail")[0] == b"{shop:eu:mail}:mutex"
    for wrong, why in (("shop:eu", "no colon"), ("a{b", "braces"), ("}", "braces")):
        with pytest.raises(ValueError, match=why):
            Mutex(client, prefix=wrong)


def test_patterns_for_sql_only_name_the_alternative() -> None:
    for name in ("lock", "Locks", "AsyncLocks", "fenced", "guarded", "semaphore", "Queue", "Worker"):
        with pytest.raises(sl.Unsupported, match=rf"no sqlalchemy_locks\.redis\.{name}: Redis .* use .*\.{name}$"):
            getattr(sqlalchemy_locks.redis, name)
    with pytest.raises(AttributeError):
        sqlalchemy_locks.redis.nothing  # noqa: B018


def test_redis_py_is_imported_only_when_used() -> None:
    script = "import sys, sqlalchemy_locks; assert 'redis' not in sys.modules; sys.modules['redis'] = None"
    process = subprocess.run(
        [sys.executable, "-c", f"{script}; import sqlalchemy_locks.redis"], capture_output=True, text=True, check=False
    )
    assert "pip install 'sqlalchemy-locks[redis]'" in process.stderr


@pytest.mark.parametrize("name", ["Mutex", "Timeout"])
def test_signatures_match_the_sql_pattern(name: str) -> None:
    """The same methods with the same parameters in the same order.

    Calls on Redis never wait, so there is no ``nowait``; and there are no lists for monitoring.
    """
    here, there = getattr(sqlalchemy_locks.redis, name), getattr(sl, name)
    methods = {method for method in vars(there) if not method.startswith("_")} - {"held", "listed"}
    assert methods == {method for method in dir(here) if not method.startswith("_")} - {"kind"}
    for method in methods:
        taken = list(inspect.signature(getattr(there, method)).parameters.values())
        expected = [(each.name, each.kind, each.default) for each in taken if each.name != "nowait"]
        parameters = inspect.signature(getattr(here, method)).parameters.values()
        assert [(each.name, each.kind, each.default) for each in parameters] == expected, method

"""Errors of the library as HTTP answers, for any framework."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.integrations.problem import KEY_SPENT, LOCKED, LOST, NO_ROOM, problem, problem_of, retry_of

ANSWERS: list[tuple[LockError, int, str, str | None]] = [
    (sl.LockTimeout("'a' was not free"), 423, "locked", "1"),
    (sl.LockTimeout("'a' had no room", (), "lease"), 423, "locked", "1"),
    (sl.LockTimeout("'a' had no room", (), "semaphore"), 429, "no-room", "5"),
    (sl.PoolTimeout("no connection was free"), 503, "unavailable", "1"),
    (sl.PoolTimeout("no connection was free", (), "semaphore"), 503, "unavailable", "1"),
    (sl.IdempotencyConflict("for other semaphores"), 409, "another-request", None),
    (sl.RequestHeld("held"), 409, "in-progress", "5"),
    (sl.RequestOver("granted before", "RELEASED"), 409, "key-spent", None),
    (sl.SemaphoreHeld("held"), 409, "held", "5"),
    (sl.StaleToken("too late", 7), 409, "superseded", None),
    (sl.UnknownRow("no such row"), 404, "not-found", None),
    (sl.LockLost("its connection died"), 503, "lost", "1"),
    (sl.OutcomeUnknown("done, or not"), 503, "outcome-unknown", None),
    (sl.NotWritable("a standby"), 503, "unavailable", "1"),
    (sl.MustRollback("an old snapshot"), 503, "unavailable", "1"),
    (sl.UnknownSemaphore("never created"), 500, "failed", None),
    (sl.NotInstalled("no tables"), 500, "failed", None),
    (sl.ReentryError("twice"), 500, "failed", None),
]


def every_error(root: type[LockError] = LockError) -> set[type[LockError]]:
    return {root}.union(*(every_error(one) for one in root.__subclasses__()))


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"), ANSWERS, ids=lambda value: type(value).__name__ if value else ""
)
def test_error_to_status_and_code(error: LockError, status: int, code: str, retry: str | None) -> None:
    answer = problem_of(error)
    assert (answer.status, answer.code, answer.headers.get("Retry-After")) == (status, code, retry)
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert json.loads(answer.content) == answer.body
    assert answer.body["status"] == status
    assert str(error) not in answer.body["detail"]


@pytest.mark.parametrize("error", sorted(every_error(), key=lambda one: one.__name__))
def test_every_error_has_a_kind(error: type[LockError]) -> None:
    given: dict[Any, tuple[Any, ...]] = {sl.StaleToken: ("why", 1), sl.RequestOver: ("why", "EXPIRED")}
    assert problem_of(error(*given.get(error, ("why",)))).status in {404, 409, 423, 429, 500, 503}


def test_answer_names_no_holder() -> None:
    holder = sl.Holder("invoice:42", "web-1.internal:4711:ab", None)
    error = sl.LockTimeout("'invoice:42' was not free within 5 s", (holder,))
    assert b"web-1" not in problem_of(error).content


def test_retry_after_defaults_and_rounding() -> None:
    error = sl.LockTimeout("'a' was not free")
    assert problem_of(error, retry_after=1.2).headers["Retry-After"] == "2"
    assert problem_of(error, retry_after=timedelta(minutes=2)).headers["Retry-After"] == "120"
    assert problem_of(error, retry_after=0).headers["Retry-After"] == "0"
    assert "Retry-After" not in problem(KEY_SPENT, retry_after=3).headers
    for wrong in (-1, "5m", True, float("nan")):
        with pytest.raises((TypeError, ValueError)):
            problem_of(error, retry_after=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("timeout", "lock", "room"), [(None, 1, 5), (0, 1, 5), (2.5, 3, 5), (30, 30, 30), (900, 60, 60)]
)
def test_retry_after_is_at_least_the_timeout(timeout: float | None, lock: int, room: int) -> None:
    assert (retry_of(LOCKED, timeout), retry_of(NO_ROOM, timeout)) == (lock, room)
    assert (retry_of(KEY_SPENT, timeout), retry_of(LOST, timeout)) == (None, 1)

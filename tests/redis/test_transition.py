"""StateTransition on Redis: capture, set the status with a claim, expire."""

from __future__ import annotations

import pytest
import redis

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import StateTransition, Task
from tests.redis.conftest import Party
from tests.redis.test_timeout import Clock


def test_task_is_captured_and_given_a_new_status(party: Party, queue: str) -> None:
    tasks = StateTransition(party.client)
    assert party(tasks.create("b", "a", "c", queue=queue)) == 3
    assert party(tasks.create("a", "d", queue=queue)) == 1
    first, second = party(tasks.capture(2, queue=queue))
    assert first == Task(queue, "a", "in_progress", first.claim, None, None)
    assert (second.id, type(first.claim)) == ("b", int)
    assert [task.id for task in party(tasks.capture(9, queue=queue))] == ["c", "d"]
    assert party(tasks.capture(9, queue=queue)) == []
    assert party(tasks.set_status("b", "failed", queue=queue)) is True
    assert party(tasks.set_status("b", "done", queue=queue)) is False
    assert party(tasks.set_status("a", "cancelled", queue=queue)) is True
    assert [task.id for task in party(tasks.capture(9, queue=queue))] == ["b"], "cancelled is not ready"
    assert party(tasks.set_status("a", "done", queue=queue)) is False
    assert party(tasks.set_status("a", "done", queue=queue, force=True)) is True
    assert [task.id for task in party(tasks.capture(9, queue=queue))] == ["a"]


def test_an_old_claim_changes_nothing(party: Party, queue: str) -> None:
    tasks = StateTransition(party.client)
    party(tasks.create("a", queue=queue))
    (mine,) = party(tasks.capture(1, queue=queue))
    assert party(tasks.set_status("a", "failed", queue=queue, force=True)) is True
    (theirs,) = party(tasks.capture(1, queue=queue))
    assert theirs.claim > mine.claim
    assert party(tasks.set_status("a", "done", queue=queue, claim=mine.claim)) is False
    assert party(tasks.set_status("a", "done", queue=queue, claim=mine.claim, force=True)) is False
    assert party(tasks.set_status("a", "done", queue=queue, claim=theirs.claim)) is True
    assert party(tasks.set_status("a", "done", queue=queue, claim=theirs.claim)) is False


def test_expired(party: Party, queue: str) -> None:
    clock = Clock()
    tasks = StateTransition(party.client, ready=("new", "timeout"), captured="busy", clock=clock)
    party(tasks.create("a", "b", "c", queue=queue, timeout=60))
    party(tasks.create("d", queue=queue))
    assert [task.timeout for task in party(tasks.capture(9, queue=queue))] == [60, 60, 60, None]
    assert party(tasks.set_status("b", "new", queue=queue)) is True
    clock.now += 30
    assert [task.id for task in party(tasks.capture(9, queue=queue))] == ["b"]
    clock.now += 30
    assert party(tasks.expire(queue=queue)) == 0
    clock.now += 1
    assert party(tasks.expire(queue=queue)) == 2
    assert party(tasks.expire(queue=queue)) == 0
    assert party(tasks.set_status("a", "new", queue=queue)) is False
    assert [task.id for task in party(tasks.capture(9, queue=queue))] == ["a", "c"]
    assert party(tasks.set_status("a", "busy", queue=queue)) is True, "which begins its time anew"
    clock.now += 1000
    assert party(tasks.expire(queue=queue)) == 3
    closed = StateTransition(party.client, ready=("new",), captured="busy", clock=clock)
    assert party(closed.capture(9, queue=queue)) == [], "timeout is not ready here"


def test_each_capture_spends_a_retry(party: Party, queue: str) -> None:
    tasks = StateTransition(party.client)
    party(tasks.create("a", queue=queue, retries=2))
    for left in (1, 0):
        (task,) = party(tasks.capture(9, queue=queue))
        assert task.retries_left == left
        party(tasks.set_status("a", "failed", queue=queue))
    assert party(tasks.capture(9, queue=queue)) == []
    assert party(tasks.set_retries("a", None, queue=queue)) is True
    (task,) = party(tasks.capture(9, queue=queue))
    assert task.retries_left is None


def test_unknown_ids_raise(party: Party, queue: str) -> None:
    tasks = StateTransition(party.client)
    with pytest.raises(sl.UnknownTask):
        party(tasks.set_status("a", "done", queue=queue))
    with pytest.raises(sl.UnknownTask):
        party(tasks.set_status("a", "done", queue=queue, force=True))
    with pytest.raises(sl.UnknownTask):
        party(tasks.set_retries("a", 1, queue=queue))


def test_status_numbers_follow_the_pattern_and_stay(party: Party, queue: str, plain: redis.Redis) -> None:
    party(StateTransition(party.client).create("a", "b", queue=queue))
    more = StateTransition(party.client, ready=("new", "done", "failed"))
    assert len(party(more.capture(1, queue=queue))) == 1
    assert party(more.set_status("a", "failed", queue=queue)) is True
    key = f"{{sqlalchemy_locks:{queue}}}:task"
    numbers = {
        status: int(plain.hget(f"{key}:facts", f"status:{status}") or -1)
        for status in ("done", "in_progress", "failed")
    }
    assert numbers == {"done": 0, "in_progress": 1, "failed": 2}
    assert plain.zrange(key, 0, -1, withscores=True) == [(b"b", 0), (b"a", 2)]

"""Mutex on Redis: the results of the SQL mutex, with each kind of client."""

from __future__ import annotations

import time

import pytest
import redis

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import Mutex
from tests.redis.conftest import Party


def test_held_until_released(party: Party, queue: str) -> None:
    mutex = Mutex(party.client)
    assert party(mutex.create("a", "b", queue=queue)) == 2
    assert party(mutex.create("b", "c", queue=queue)) == 1
    assert party(mutex.acquire("a", queue=queue)) is True
    assert party(mutex.create("a", queue=queue)) == 0
    assert party(mutex.acquire("a", queue=queue)) is False
    assert party(mutex.acquire("b", queue=queue)) is True
    assert party(mutex.release("a", queue=queue)) is True
    assert party(mutex.release("a", queue=queue)) is False
    assert party(mutex.acquire("a", queue=queue)) is True


def test_prefixes_and_queues_are_separate(party: Party, queue: str) -> None:
    mine, theirs = Mutex(party.client), Mutex(party.client, prefix="theirs")
    assert party(mine.create("a", queue=queue)) == 1
    assert party(theirs.create("a", queue=queue)) == 1
    assert party(mine.acquire("a", queue=queue)) is True
    assert party(theirs.acquire("a", queue=queue)) is True
    with pytest.raises(sl.UnknownTask, match="'a'.*other"):
        party(mine.acquire("a", queue=f"{queue}, other"))


def test_unknown_ids_raise(party: Party, queue: str) -> None:
    mutex = Mutex(party.client)
    party(mutex.create("b", queue=queue))
    for call in (mutex.acquire, mutex.acquire_token, mutex.release):
        with pytest.raises(sl.UnknownTask, match=rf"mutex\.\w+: there is no 'a' in .*{queue}.*create\(\)"):
            party(call("a", queue=queue))
        with pytest.raises(sl.UnknownTask):
            party(call("a", queue=queue, owner="me"))
    with pytest.raises(sl.UnknownTask):
        party(mutex.set_retries("a", 1, queue=queue))


def test_tokens_rise(party: Party, queue: str, plain: redis.Redis) -> None:
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    before = time.time_ns() // 1000
    tokens = []
    for _ in range(3):
        tokens.append(party(mutex.acquire_token("a", queue=queue)))
        assert party(mutex.acquire_token("a", queue=queue)) is None
        party(mutex.release("a", queue=queue))
        party(mutex.acquire("a", queue=queue))
        party(mutex.release("a", queue=queue))
    assert before < tokens[0] < tokens[1] < tokens[2]


def test_tokens_rise_after_the_clock_was_set_back(party: Party, queue: str, plain: redis.Redis) -> None:
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    future = 4 * 10**15
    plain.hset(f"{{sqlalchemy_locks:{queue}}}:mutex:facts", "fence:a", future)
    assert party(mutex.acquire_token("a", queue=queue)) == future + 1


def test_owners(party: Party, queue: str) -> None:
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    assert party(mutex.acquire("a", queue=queue, owner="me")) is True
    assert party(mutex.acquire("a", queue=queue, owner="me")) is False
    assert party(mutex.release("a", queue=queue, owner="you")) is False
    assert party(mutex.release("a", queue=queue, owner="me")) is True
    assert party(mutex.release("a", queue=queue, owner="me")) is False
    assert party(mutex.acquire("a", queue=queue)) is True
    assert party(mutex.release("a", queue=queue, owner="me")) is False, "the last owner's name is gone"
    assert party(mutex.release("a", queue=queue)) is True
    assert party(mutex.acquire_token("a", queue=queue, owner="me")) > 0
    assert party(mutex.release("a", queue=queue)) is True, "anybody may, without an owner"


def test_retries(party: Party, queue: str) -> None:
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue, retries=2))
    party(mutex.create("never", queue=queue, retries=0))
    assert party(mutex.acquire("never", queue=queue)) is False
    for _ in range(2):
        assert party(mutex.acquire("a", queue=queue)) is True
        assert party(mutex.acquire("a", queue=queue)) is False, "which costs nothing"
        assert party(mutex.release("a", queue=queue)) is True
    assert party(mutex.acquire("a", queue=queue)) is False
    assert party(mutex.acquire_token("a", queue=queue)) is None
    assert party(mutex.capture(9, queue=queue)) == []
    assert party(mutex.set_retries("a", 1, queue=queue)) is True
    assert party(mutex.capture(9, queue=queue)) == ["a"]
    party(mutex.release("a", queue=queue))
    assert party(mutex.capture(9, queue=queue)) == []
    assert party(mutex.set_retries("a", None, queue=queue)) is True
    for _ in range(4):
        assert party(mutex.acquire("a", queue=queue)) is True
        assert party(mutex.release("a", queue=queue)) is True


def test_capture(party: Party, queue: str) -> None:
    mutex = Mutex(party.client)
    ids = [f"é {number:03}" for number in range(50)]
    party(mutex.create(*reversed(ids), queue=queue))
    for id in ids[:20]:
        party(mutex.set_retries(id, 0, queue=queue))
    party(mutex.acquire(ids[21], queue=queue))
    assert party(mutex.capture(3, queue=queue, owner="me")) == [ids[20], ids[22], ids[23]]
    assert party(mutex.acquire(ids[22], queue=queue)) is False
    assert party(mutex.release(ids[22], queue=queue, owner="me")) is True
    assert party(mutex.capture(100, queue=queue)) == [ids[22], *ids[24:]]
    assert party(mutex.capture(1, queue=queue)) == []
    assert party(mutex.capture(1, queue=f"{queue}, another")) == []

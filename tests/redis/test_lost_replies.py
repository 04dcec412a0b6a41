"""Lost replies: redis-py resends the command, and the second copy changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout
from sqlalchemy_locks.redis.client import LATE
from tests import servers as real
from tests.redis.conftest import Party
from tests.redis.proxy import Proxy

Make = Callable[..., Party]


@pytest.fixture
def proxy(server: real.Redis) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def party(make: Make, proxy: Proxy) -> Party:
    return make(proxy.port, again=3)


def evals(proxy: Proxy) -> int:
    return sum(b"EVALSHA" in request for request in proxy.requests)


@pytest.fixture
def mutex(party: Party, queue: str, proxy: Proxy) -> Mutex[Any]:
    mutex = Mutex(party.client)
    party(mutex.create("a", "b", "c", queue=queue, retries=50))
    for call in (mutex.acquire, mutex.release):
        party(call("a", queue=queue))  # known to the server
    party(mutex.set_retries("a", 50, queue=queue))
    proxy.requests.clear()
    return mutex


def test_resent_acquire_returns_its_first_answer(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    proxy.lose(b"EVAL")
    assert party(mutex.acquire("a", queue=queue, owner="me")) is True
    assert proxy.has_lost
    assert evals(proxy) == 2
    assert plain.hget(f"{{sqlalchemy_locks:{queue}}}:mutex:facts", "retries:a") == b"49"
    assert party(mutex.acquire("a", queue=queue)) is False
    assert party(mutex.release("a", queue=queue, owner="me")) is True


def test_resent_acquire_token_returns_the_same_token(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    proxy.lose(b"EVAL")
    token = party(mutex.acquire_token("a", queue=queue))
    assert str(token).encode() == plain.hget(f"{{sqlalchemy_locks:{queue}}}:mutex:facts", "fence:a")


def test_resent_acquire_that_was_refused_stays_refused(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    party(mutex.acquire("a", queue=queue))
    proxy.lose(b"EVAL", meanwhile=lambda: Mutex(plain).release("a", queue=queue))
    assert party(mutex.acquire("a", queue=queue)) is False
    assert Mutex(plain).acquire("a", queue=queue) is True


def test_resent_release_does_not_free_the_next_holder(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    party(mutex.acquire("a", queue=queue))
    taken: list[bool] = []
    others = Mutex(plain)
    proxy.lose(b"EVAL", meanwhile=lambda: taken.append(others.acquire("a", queue=queue)))
    assert party(mutex.release("a", queue=queue)) is True
    assert taken == [True]
    assert others.acquire("a", queue=queue) is False, "the next holder has it still"
    # nor after two more acquisitions
    assert others.release("a", queue=queue) is True
    party(mutex.acquire("a", queue=queue))

    def two_more() -> None:
        for _ in range(2):
            taken.append(others.acquire("a", queue=queue))
            taken.append(others.release("a", queue=queue))
        taken.append(others.acquire("a", queue=queue))

    proxy.lose(b"EVAL", meanwhile=two_more)
    assert party(mutex.release("a", queue=queue)) is True
    assert taken == [True] * 6
    assert others.acquire("a", queue=queue) is False


def test_resent_capture_returns_the_same_ids(party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str) -> None:
    proxy.lose(b"EVAL")
    assert party(mutex.capture(2, queue=queue)) == ["a", "b"]
    assert proxy.has_lost
    assert party(mutex.capture(2, queue=queue)) == ["c"]


def test_resent_create_returns_the_same_count(party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str) -> None:
    proxy.lose(b"EVAL")
    assert party(mutex.create("c", "d", "e", queue=queue)) == 2
    assert proxy.has_lost


def test_resent_timeout_acquire_returns_its_first_answer(party: Party, proxy: Proxy, queue: str) -> None:
    timeout = Timeout(party.client, every=3600)
    party(timeout.create("a", "b", queue=queue))
    with pytest.raises(sl.UnknownTask):
        party(timeout.acquire("no", queue=queue))
    proxy.lose(b"EVAL")
    assert party(timeout.acquire("a", queue=queue)) is True
    assert proxy.has_lost
    assert party(timeout.acquire("a", queue=queue)) is False


def test_resent_task_capture_returns_the_same_task(party: Party, proxy: Proxy, queue: str, plain: redis.Redis) -> None:
    tasks = StateTransition(party.client)
    party(tasks.create("a", "b", "c", queue=queue))
    (a,) = party(tasks.capture(1, queue=queue))
    proxy.lose(b"EVAL")
    (b,) = party(tasks.capture(1, queue=queue))
    assert proxy.has_lost
    assert (a.id, b.id) == ("a", "b")
    assert party(tasks.set_status("b", "done", queue=queue, claim=b.claim)) is True
    captured: list[Any] = []
    proxy.lose(b"EVAL", meanwhile=lambda: captured.extend(StateTransition(plain).capture(1, queue=queue)))
    assert party(tasks.set_status("a", "failed", queue=queue, claim=a.claim)) is True
    assert [task.id for task in captured] == ["a"]
    assert party(tasks.set_status("a", "done", queue=queue, claim=captured[0].claim)) is True


@pytest.mark.parametrize("name", ["acquire", "acquire_token", "release"])
def test_lost_reply_without_retries_is_outcome_unknown(
    make: Make, mutex: Mutex[Any], proxy: Proxy, queue: str, name: str, party: Party, plain: redis.Redis
) -> None:
    once = make(proxy.port, again=0)
    impatient = Mutex(once.client)
    once(impatient.set_retries("b", None, queue=queue))
    if name == "release":
        party(mutex.acquire("a", queue=queue))
    proxy.lose(b"EVAL")
    with pytest.raises(sl.OutcomeUnknown, match=r"mutex\.\w+: no answer came from Redis"):
        once(getattr(impatient, name)("a", queue=queue))
    assert once(impatient.acquire("b", queue=queue)) is True, "the next call has a connection again"


def test_late_call_changes_nothing(party: Party, mutex: Mutex[Any], queue: str, plain: redis.Redis) -> None:
    def began_before(seconds: float) -> None:
        """Make the next call arrive this many seconds after it was made."""
        estimate = mutex._calls._estimate
        assert estimate is not None
        mutex._calls._estimate = estimate[0] - seconds, estimate[1]

    party(mutex.acquire("a", queue=queue))
    began_before(LATE + 5)
    with pytest.raises(sl.OutcomeUnknown, match="more than 60 seconds after"):
        party(mutex.release("a", queue=queue))
    assert Mutex(plain).acquire("a", queue=queue) is False
    assert party(mutex.release("a", queue=queue)) is True, "the clock has been asked again"
    began_before(LATE / 2)
    assert party(mutex.acquire("a", queue=queue)) is True


def test_answers_expire_after_their_calls_are_late(
    party: Party, mutex: Mutex[Any], queue: str, plain: redis.Redis
) -> None:
    began = plain.time()[0]
    for _ in range(3):
        party(mutex.acquire("a", queue=queue))
        party(mutex.release("a", queue=queue))
    kept = plain.keys(f"*{queue}}}:mutex:calls:*")
    ttls = [plain.ttl(key) for key in kept]
    elapsed = plain.time()[0] - began
    assert 1 <= len(kept) <= 2 + elapsed // 10
    for ttl in ttls:
        assert LATE - elapsed < ttl <= LATE + 20

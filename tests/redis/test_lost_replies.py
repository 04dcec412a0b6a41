"""Lost replies: redis-py resends the command, and the second copy changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout, base, transition
from sqlalchemy_locks.redis import mutex as mutex_
from sqlalchemy_locks.redis import timeout as timeout_
from sqlalchemy_locks.redis.client import LATE, RedisScript
from tests import servers as real
from tests.faults.proxy import Proxy
from tests.redis.conftest import Party

Make = Callable[..., Party]


@pytest.fixture
def proxy(server: real.Redis) -> Iterator[Proxy]:
    with Proxy(server.url(), opaque=True) as proxy:
        yield proxy


@pytest.fixture
def party(make: Make, proxy: Proxy) -> Party:
    return make(proxy.port, again=3)


@pytest.fixture(autouse=True)
def loaded(plain: redis.Redis) -> None:
    """Load all scripts, so that the reply that is lost is never the server's question for one."""
    for module in (base, mutex_, timeout_, transition):
        for each in vars(module).values():
            if isinstance(each, RedisScript):
                plain.script_load(each.source.decode())


@pytest.fixture
def mutex(party: Party, queue: str, proxy: Proxy) -> Mutex[Any]:
    mutex = Mutex(party.client)
    party(mutex.create("a", "b", "c", queue=queue, retries=50))
    proxy.forget()
    return mutex


def test_resent_acquire_returns_its_first_answer(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    proxy.lose_answer(b"EVAL")
    token = party(mutex.acquire_token("a", queue=queue, owner="me"))
    assert proxy.losses
    assert sum(b"EVALSHA" in request for request in proxy.asked) == 2
    facts = f"{{sqlalchemy_locks:{queue}}}:mutex:facts"
    assert plain.hmget(facts, "retries:a", "fence:a") == [b"49", str(token).encode()]
    assert party(mutex.acquire("a", queue=queue)) is False
    assert party(mutex.release("a", queue=queue, owner="me")) is True


def test_resent_acquire_that_was_refused_stays_refused(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    party(mutex.acquire("a", queue=queue))
    proxy.lose_answer(b"EVAL", lambda: Mutex(plain).release("a", queue=queue))
    assert party(mutex.acquire("a", queue=queue)) is False
    assert Mutex(plain).acquire("a", queue=queue) is True


def test_resent_release_does_not_free_the_next_holder(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    party(mutex.acquire("a", queue=queue))
    taken: list[bool] = []
    others = Mutex(plain)
    proxy.lose_answer(b"EVAL", lambda: taken.append(others.acquire("a", queue=queue)))
    assert party(mutex.release("a", queue=queue)) is True
    assert taken == [True]
    assert others.acquire("a", queue=queue) is False, "the next holder has it still"


def test_resent_calls_return_their_first_answers(
    party: Party, mutex: Mutex[Any], proxy: Proxy, queue: str, plain: redis.Redis
) -> None:
    timeout = Timeout(party.client, every=3600)
    calls: list[tuple[Callable[[], Any], Any, Any]] = [
        (lambda: mutex.capture(2, queue=queue), ["a", "b"], ["c"]),
        (lambda: mutex.create("c", "d", "e", queue=queue), 2, 0),
        (lambda: timeout.create("a", queue=queue), 1, 0),
        (lambda: timeout.acquire("a", queue=queue), True, False),
    ]
    for number, (call, first, second) in enumerate(calls, 1):
        proxy.lose_answer(b"EVAL")
        assert party(call()) == first
        assert proxy.losses == number
        assert party(call()) == second


def test_resent_task_capture_returns_the_same_task(party: Party, proxy: Proxy, queue: str, plain: redis.Redis) -> None:
    tasks = StateTransition(party.client)
    party(tasks.create("a", "b", "c", queue=queue))
    (a,) = party(tasks.capture(1, queue=queue))
    proxy.lose_answer(b"EVAL")
    (b,) = party(tasks.capture(1, queue=queue))
    assert proxy.losses
    assert (a.id, b.id) == ("a", "b")
    assert party(tasks.set_status("b", "done", queue=queue, claim=b.claim)) is True
    captured: list[Any] = []
    proxy.lose_answer(b"EVAL", lambda: captured.extend(StateTransition(plain).capture(1, queue=queue)))
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
    proxy.lose_answer(b"EVAL")
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


@pytest.mark.parametrize("offset", [0, 9])
def test_answers_outlive_the_deadline_of_their_calls(
    party: Party, mutex: Mutex[Any], queue: str, plain: redis.Redis, offset: int
) -> None:
    """Otherwise a copy that isn't late yet would be executed again."""
    start = plain.time()[0] // 10 * 10 + 1000
    estimate = start + offset - LATE - time.monotonic() + 0.1
    mutex._calls._estimate = estimate, time.monotonic()
    party(mutex.acquire("a", queue=queue))
    answers = f"{{sqlalchemy_locks:{queue}}}:mutex:calls:{start // 10}"
    assert plain.execute_command("PEXPIRETIME", answers) == (start + 11) * 1000

"""Servers that forget scripts, restart with or without data, are replicas, or clusters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import redis
import redis.asyncio
from redis.exceptions import ClusterDownError, MaxConnectionsError, SlotNotCoveredError

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout
from tests import servers as real
from tests.faults.proxy import Proxy
from tests.redis.conftest import Party, closed, started_or_skipped

Make = Callable[..., Party]


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[real.Redis]:
    """A separate server for the test; with the parameter, one that persists its data."""
    started = started_or_skipped(real.Redis(appendonly=getattr(request, "param", False)))
    yield started
    started.close()


def test_each_call_is_one_round_trip(make: Make, server: real.Redis, queue: str) -> None:
    with Proxy(server.url(), opaque=True) as proxy:
        party = make(proxy.port)
        mutex, timeout, tasks = Mutex(party.client), Timeout(party.client, every=1), StateTransition(party.client)
        calls = [
            *(lambda: mutex.create("a", queue=queue), lambda: mutex.acquire("a", queue=queue)),
            *(lambda: mutex.acquire_token("a", queue=queue), lambda: mutex.release("a", queue=queue)),
            *(lambda: mutex.capture(3, queue=queue), lambda: mutex.set_retries("a", 3, queue=queue)),
            *(lambda: timeout.create("a", queue=queue), lambda: timeout.acquire("a", queue=queue)),
            *(lambda: timeout.acquire_token("a", queue=queue), lambda: timeout.set_retries("a", 3, queue=queue)),
            *(lambda: tasks.create("a", queue=queue, timeout=1), lambda: tasks.capture(3, queue=queue)),
            *(lambda: tasks.set_status("a", "failed", queue=queue), lambda: tasks.expire(queue=queue)),
        ]
        for call in calls:
            party(call())  # the scripts are known now, and the clock
        proxy.forget()
        for call in calls:
            party(call())
        assert len(proxy.asked) == len(calls)
        assert all(b"EVALSHA" in request for request in proxy.asked)


@pytest.mark.parametrize("blocking", [False, True])
def test_call_without_a_connection_was_not_sent(party: Party, server: real.Redis, queue: str, blocking: bool) -> None:
    """The pool is full: its own error is raised, and not ``OutcomeUnknown``."""
    module = redis.asyncio if isinstance(party.client, redis.asyncio.Redis) else redis
    options: dict[str, Any] = {"host": server.host, "port": server.port, "max_connections": 1}
    pool: Any = module.BlockingConnectionPool(timeout=0.1, **options) if blocking else module.ConnectionPool(**options)
    mutex = Mutex(module.Redis(connection_pool=pool))
    party(mutex.create("a", queue=queue))
    assert party(mutex.acquire("a", queue=queue)) is True
    taken = party(pool.get_connection(*(["PING"] if redis.__version__.startswith("5.0") else [])))
    with pytest.raises(redis.ConnectionError):
        party(mutex.release("a", queue=queue))
    party(pool.release(taken))
    assert party(mutex.release("a", queue=queue)) is True
    party(pool.disconnect())


def test_texts_are_stored_as_utf_8_by_every_client(
    make: Make, server: real.Redis, queue: str, plain: redis.Redis
) -> None:
    party = make(server.port, encoding="latin-1")
    mutex = Mutex(party.client)
    assert party(mutex.create("日é", queue=queue)) == 1
    assert party(mutex.capture(3, queue=queue, owner="é\r\n$1")) == ["日é"]
    assert Mutex(plain).release("日é", queue=queue, owner="é\r\n$1") is True


@pytest.mark.parametrize("error", [ClusterDownError, MaxConnectionsError, SlotNotCoveredError, redis.InvalidResponse])
def test_error_that_may_follow_a_lost_reply(party: Party, queue: str, error: type[Exception]) -> None:
    """A client of a cluster resends a call, and raises the cluster's error if that isn't reachable any more."""
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    lost = patch.object(party.client, "execute_command", side_effect=error(""))
    with lost, pytest.raises(sl.OutcomeUnknown, match=error.__name__):
        party(mutex.acquire("a", queue=queue))


@pytest.mark.parametrize("own", [True], indirect=True)
def test_server_restarted_with_its_data(make: Make, own: real.Redis) -> None:
    party = make(own.port, again=1)
    mutex, tasks = Mutex(party.client), StateTransition(party.client)
    party(mutex.create("a", "b", retries=5))
    party(tasks.create("a"))
    token = party(mutex.acquire_token("a", owner="me"))
    (task,) = party(tasks.capture(1))
    own.restart()
    assert party(mutex.acquire("a")) is False
    assert party(mutex.release("a", owner="you")) is False
    assert party(mutex.release("a", owner="me")) is True
    assert party(mutex.acquire_token("a")) > token
    assert party(tasks.capture(1)) == []
    assert party(tasks.set_status("a", "done", claim=task.claim)) is True


def test_server_restarted_without_its_data(make: Make, own: real.Redis) -> None:
    party = make(own.port, again=1)
    mutex, timeout = Mutex(party.client), Timeout(party.client, every=3600)
    party(mutex.create("a"))
    token = party(mutex.acquire_token("a"))
    party(timeout.create("a"))
    party(timeout.acquire("a"))
    own.kill()
    own.start()
    for call in (mutex.acquire, mutex.release, timeout.acquire):
        with pytest.raises(sl.UnknownTask):
            party(call("a"))
    assert party(mutex.create("a")) == 1
    assert party(mutex.acquire_token("a")) > token, "tokens rise all the same"


def test_server_that_is_down(make: Make, own: real.Redis) -> None:
    party = make(own.port, again=1)
    mutex, asked_first = Mutex(party.client), Mutex(party.client)
    party(mutex.create("a"))
    own.kill()
    with pytest.raises(sl.OutcomeUnknown, match="no answer came from Redis"):
        party(mutex.acquire("a"))
    with pytest.raises(redis.ConnectionError):  # nothing of the call itself had been sent
        party(asked_first.acquire("a"))
    own.start()
    party(mutex.create("a"))
    assert party(mutex.acquire("a")) is True


def test_server_that_does_not_answer(make: Make, own: real.Redis) -> None:
    """A server that doesn't answer delays calls by redis-py's timeouts only."""
    party = make(own.port, again=0, socket_timeout=0.1)
    mutex = Mutex(party.client)
    for _ in range(100):  # a busy machine may need some of them, too
        with contextlib.suppress(redis.TimeoutError, sl.OutcomeUnknown):
            party(mutex.create("a"))
            break
    own.pause()
    try:
        with pytest.raises(sl.OutcomeUnknown):
            party(mutex.acquire("a"))
    finally:
        own.resume()
    # whatever its outcome was, it is one acquisition
    after = make(own.port)
    mutex = Mutex(after.client)
    after(mutex.acquire("a"))
    assert after(mutex.release("a")) is True
    assert after(mutex.release("a")) is False


def test_replica_is_refused(make: Make, own: real.Redis, server: real.Redis) -> None:
    with redis.Redis(host=own.host, port=own.port) as administrator:
        party = make(own.port)
        mutex = Mutex(party.client)
        party(mutex.create("a"))
        administrator.replicaof(server.host, server.port)
        with pytest.raises(sl.NotWritable, match=r"mutex\.acquire: .* replica"):
            party(mutex.acquire("a"))


def use_all(party: Callable[[Any], Any], client: Any, queue: str) -> None:
    """Every method, in a new queue."""
    mutex, tasks = Mutex(client), StateTransition(client)
    timeout = Timeout(client, every=3600, windowed=True)
    assert party(mutex.create("a", queue=queue, retries=3)) == 1
    assert party(mutex.acquire("a", queue=queue)) is True
    assert party(mutex.release("a", queue=queue)) is True
    assert party(mutex.capture(3, queue=queue)) == ["a"]
    assert party(timeout.create("a", queue=queue)) == 1
    assert party(timeout.acquire("a", queue=queue)) is True
    assert party(tasks.create("a", queue=queue, timeout=3600)) == 1
    assert [task.id for task in party(tasks.capture(3, queue=queue))] == ["a"]
    assert party(tasks.expire(queue=queue)) == 0
    assert party(tasks.set_status("a", "done", queue=queue)) is True


def test_required_permissions(make: Make, server: real.Redis, plain: redis.Redis, queue: str) -> None:
    """The permissions listed in docs/redis.md are enough."""
    rights = "+@read +@write +evalsha +eval +time ~{sqlalchemy_locks:* resetchannels"
    plain.execute_command("ACL SETUSER", "app", "reset", "on", ">secret", "+@connection", *rights.split())
    plain.script_flush()
    party = make(server.port, username="app", password="secret")
    use_all(party, party.client, queue)


@pytest.fixture(scope="module")
def cluster() -> Iterator[real.Redis]:
    started = started_or_skipped(real.Redis(cluster=True))
    yield started
    started.close()


@pytest.mark.parametrize("queue", ["mail", "a}b{c"])
def test_cluster(cluster: real.Redis, queue: str) -> None:
    with redis.Redis(host=cluster.host, port=cluster.port) as administrator:
        administrator.flushall()
        administrator.script_flush()
        client = redis.RedisCluster(host=cluster.host, port=cluster.port)
        use_all(lambda answer: answer, client, queue)
        assert asyncio.run(acquired_again(cluster, queue)) is False
        assert Mutex(client).release("a", queue=queue) is True
        keys = administrator.keys("*")
        assert len(keys) >= 8
        assert len({administrator.execute_command("CLUSTER KEYSLOT", key) for key in keys}) == 1
        client.close()


async def acquired_again(cluster: real.Redis, queue: str) -> bool:
    client = redis.asyncio.RedisCluster(host=cluster.host, port=cluster.port)
    acquired = await Mutex(client).acquire("a", queue=queue)
    await closed(client)
    return acquired

"""A reply that an interrupted command has left unread never answers the next call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from sqlalchemy_locks.redis import Mutex
from tests import servers as real
from tests.redis.conftest import Party

#: answers 1, after redis-py has looked for unread replies before the next command
SLOW = """
local function micros() local time = redis.call('TIME') return time[1] * 1000000 + time[2] end
local began = micros()
while micros() < began + 100000 do end
return 1
"""


class Interrupted(BaseException):
    """What a signal handler raises."""


class Connection(redis.Connection):
    """A connection whose next command is interrupted before it reads its reply."""

    interrupts = False

    def read_response(self, *args: Any, **options: Any) -> Any:
        if self.interrupts:
            type(self).interrupts = False
            raise Interrupted
        return super().read_response(*args, **options)


class AsyncConnection(redis.asyncio.Connection):
    """As ``Connection``, asynchronous."""

    interrupts = False

    async def read_response(self, *args: Any, **options: Any) -> Any:
        if self.interrupts:
            type(self).interrupts = False
            raise Interrupted
        return await super().read_response(*args, **options)


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sync": (redis.Redis, redis.ConnectionPool, Connection),
    "async": (redis.asyncio.Redis, redis.asyncio.ConnectionPool, AsyncConnection),
}
Interrupt = Callable[[Callable[[], Any]], None]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["one connection", "pool"])
def party(request: pytest.FixtureRequest, kind: str, server: real.Redis) -> Iterator[Party]:
    client, pool, connection = KINDS[kind]
    connections = pool(connection_class=connection, host=server.host, port=server.port)
    party = Party(client(connection_pool=connections, single_connection_client=request.param))
    yield party
    party.close()


@pytest.fixture
def interrupt(kind: str, party: Party) -> Interrupt:
    def interrupt(call: Callable[[], Any]) -> None:
        KINDS[kind][2].interrupts = True
        with pytest.raises(Interrupted):
            party(call())

    return interrupt


@pytest.fixture
def mutex(party: Party, queue: str) -> Mutex[Any]:
    mutex = Mutex(party.client)
    party(mutex.create("held", "free", queue=queue))
    party(mutex.acquire("held", queue=queue))
    assert party(mutex.acquire("held", queue=queue)) is False
    return mutex


def test_the_next_call_gets_its_own_answer(party: Party, mutex: Mutex[Any], queue: str, interrupt: Interrupt) -> None:
    interrupt(lambda: party.client.eval(SLOW, 0))
    assert party(mutex.acquire("held", queue=queue)) is False
    interrupt(lambda: mutex.acquire("free", queue=queue))
    assert party(mutex.acquire("held", queue=queue)) is False
    assert party(mutex.acquire("free", queue=queue)) is False, "the interrupted call took effect"
    assert party(mutex.release("free", queue=queue)) is True


def test_the_server_time_is_not_another_reply(
    party: Party, mutex: Mutex[Any], queue: str, interrupt: Interrupt
) -> None:
    mutex._calls._estimate = None
    interrupt(lambda: party.client.eval(SLOW, 0))
    assert party(mutex.acquire("free", queue=queue)) is True

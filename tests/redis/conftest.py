"""A real Redis server for these tests, and a client of each kind."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests import servers as real

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[real.Redis]:
    started = started_or_skipped(real.Redis())
    yield started
    started.close()


def started_or_skipped(server: real.Redis) -> real.Redis:
    try:
        return server.start()
    except real.Unavailable as why:
        if os.environ.get("CI") == "true":
            pytest.fail(str(why))
        pytest.skip(str(why))


@pytest.fixture
def plain(server: real.Redis) -> Iterator[redis.Redis]:
    """The tests' own connection to the server."""
    client = redis.Redis(host=server.host, port=server.port)
    yield client
    client.close()


@pytest.fixture
def queue() -> str:
    """A queue that no other test uses."""
    return f"queue {next(_numbers)}"


class Party:
    """A client, and a way to get the results of its calls."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._loop = asyncio.new_event_loop() if isinstance(client, redis.asyncio.Redis) else None

    def __call__(self, called: Any) -> Any:
        return called if self._loop is None else self._loop.run_until_complete(called)

    def close(self) -> None:
        self(self.client.connection_pool.disconnect())  # which redis-py 5 leaves open
        if self._loop is None:
            self.client.close()
        else:
            self._loop.run_until_complete(closed(self.client))
            self._loop.close()


async def closed(client: Any) -> None:
    """Close an asynchronous client; ``aclose`` is new in redis-py 5.0.1."""
    await getattr(client, "aclose", client.close)()


#: ``redis.Redis`` as it is, one that decodes what it reads, and ``redis.asyncio.Redis``
MAKERS: dict[str, Callable[..., Any]] = {
    "sync": redis.Redis,
    "decoding": lambda **options: redis.Redis(decode_responses=True, **options),
    "async": redis.asyncio.Redis,
}


def retrying(kind: str, again: int) -> dict[str, Any]:
    """Return the options of a client that resends a lost command so often; redis-py 5 resends what it is told to."""
    retry: Any = AsyncRetry if kind == "async" else Retry
    lost: list[Any] = [redis.ConnectionError, redis.TimeoutError] if again else []
    return {"retry": retry(NoBackoff(), again), "retry_on_error": lost}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Party]]:
    """Make a client of this kind, connected to a port; ``again`` is how often it resends a lost command."""
    made: list[Party] = []

    def make(port: int, again: int | None = None, **options: Any) -> Party:
        if again is not None:
            options |= retrying(request.param, again)
        made.append(Party(MAKERS[request.param](host="127.0.0.1", port=port, **options)))
        return made[-1]

    yield make
    for party in made:
        party.close()


@pytest.fixture
def party(make: Callable[..., Party], server: real.Redis) -> Party:
    return make(server.port)

"""Calls without ``execute_command``: which clients make them, and that they do what ``execute_command`` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

import sqlalchemy_locks as sl
from sqlalchemy_locks.redis import Mutex, StateTransition, Timeout
from sqlalchemy_locks.redis.client import _ASK_TIME, LATE
from sqlalchemy_locks.redis.direct import _packed, plain_method
from sqlalchemy_locks.redis.mutex import _ACQUIRE, _RELEASE
from tests import servers as real
from tests.fixtures.parties import PATIENCE, until
from tests.redis.conftest import Party, retrying, started_or_skipped
from tests.redis.proxy import Proxy
from tests.servers.place import reserved_port
from tests.servers.tls import certificate

Make = Callable[..., Party]
Connect = Callable[..., Party]

#: whether plain clients send directly: not before redis-py 6
DIRECT = int(redis.__version__.partition(".")[0]) >= 6


class Subclass(redis.Redis):
    """A client whose calls go through ``execute_command``."""


class AsyncSubclass(redis.asyncio.Redis):
    """As ``Subclass``, asynchronous."""


#: a client's class, its subclass, its pool of limited size, and its retry policy
KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "sync": (redis.Redis, Subclass, redis.BlockingConnectionPool, Retry),
    "async": (redis.asyncio.Redis, AsyncSubclass, redis.asyncio.BlockingConnectionPool, AsyncRetry),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(server: real.Redis) -> Iterator[Connect]:
    """Make a client of a class; without a pool in its options, one of the test server."""
    made: list[Party] = []

    def connect(client: Any, **options: Any) -> Party:
        if "connection_pool" not in options and "unix_socket_path" not in options:
            options = {"host": server.host, "port": server.port, **options}
        made.append(Party(client(**options)))
        return made[-1]

    yield connect
    for party in made:
        with contextlib.suppress(redis.RedisError):
            party(party.client.connection_pool.disconnect())
        party.close()


class HoldingProxy(Proxy):
    """A proxy that ends connections, or withholds replies, at requests with a given text.

    ``cut(text, executed=..., once=...)``: each such request, or the next one, ends its connection: unsent, or when the
    server has executed it.
    ``hold(text)``: the reply of the next such request is withheld until ``let_go()``; ``held`` is set meanwhile.
    """

    def __init__(self, port: int) -> None:
        self._cuts: tuple[bytes, bool, bool] | None = None
        self._holds: bytes | None = None
        self.held, self._gate = threading.Event(), threading.Event()
        super().__init__(port)

    def cut(self, text: bytes | None, *, executed: bool = False, once: bool = False) -> None:
        self._cuts = None if text is None else (text, executed, once)

    def hold(self, text: bytes) -> None:
        self._holds = text

    def let_go(self) -> None:
        self._gate.set()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            while request := client.recv(1 << 20):
                self.requests.append(request)
                cuts, executed = False, True
                if self._cuts is not None and self._cuts[0] in request:
                    cuts, executed = True, self._cuts[1]
                    if self._cuts[2]:
                        self._cuts = None
                if not executed:
                    break
                server.sendall(request)
                answer = server.recv(1 << 20)
                if cuts:
                    break
                if self._holds is not None and self._holds in request:
                    self._holds = None
                    self.held.set()
                    self._gate.wait(PATIENCE)
                client.sendall(answer)

    def scripts(self) -> list[bytes]:
        return [request for request in self.requests if b"EVALSHA" in request]


@pytest.fixture
def proxy(server: real.Redis) -> Iterator[HoldingProxy]:
    with HoldingProxy(server.port) as proxy:
        yield proxy
        proxy.let_go()


def key(queue: str) -> str:
    return f"{{sqlalchemy_locks:{queue}}}:mutex"


def answers_of(client: redis.Redis, queue: str) -> dict[bytes, dict[bytes, bytes]]:
    """Return the hashes of answers of a queue."""
    return {name: client.hgetall(name) for name in client.scan_iter(f"{key(queue)}:calls:*")}


def state(client: redis.Redis, queue: str) -> Any:
    """Return all that is stored of a queue's mutexes."""
    name = key(queue)
    return client.zrange(name, 0, -1, withscores=True), client.hgetall(f"{name}:facts"), answers_of(client, queue)


# Which clients


def sends_directly(client: Any) -> bool:
    return plain_method(client) is not None


def test_plain_clients_send_directly(connect: Connect, kind: str) -> None:
    client, _, limited, _ = KINDS[kind]
    assert sends_directly(connect(client).client) is DIRECT
    assert sends_directly(connect(client, unix_socket_path="/nowhere").client) is DIRECT
    assert sends_directly(connect(client, ssl=True).client) is DIRECT
    assert sends_directly(connect(client, connection_pool=limited(max_connections=1)).client) is DIRECT
    assert sends_directly(connect(client.from_url, decode_responses=True, url="redis://").client) is DIRECT


def test_other_clients_do_not_send_directly(server: real.Redis, connect: Connect, kind: str) -> None:
    client, subclass, _, _ = KINDS[kind]
    assert sends_directly(connect(client, single_connection_client=True).client) is False
    assert sends_directly(connect(subclass).client) is False
    module = redis.sentinel if kind == "sync" else redis.asyncio.sentinel
    sentinel = module.Sentinel([(server.host, server.port)])
    master = Party(sentinel.master_for("primary"))
    assert sends_directly(master.client) is False
    master.close()
    for each in sentinel.sentinels:
        Party(each).close()


def test_client_with_a_cache_does_not_send_directly(connect: Connect) -> None:
    cache = pytest.importorskip("redis.cache")
    party = connect(redis.Redis, protocol=3, cache_config=cache.CacheConfig())
    assert sends_directly(party.client) is False


def test_cluster_client_does_not_send_directly() -> None:
    assert sends_directly(object.__new__(redis.RedisCluster)) is False
    assert sends_directly(object.__new__(redis.asyncio.RedisCluster)) is False


def test_client_whose_metrics_are_collected_does_not_send_directly(
    connect: Connect, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = pytest.importorskip("redis.observability.providers")
    monkeypatch.setattr(providers.get_observability_instance(), "is_enabled", lambda: True)
    assert sends_directly(connect(KINDS[kind][0]).client) is False


class Reachable(real.Redis):
    """A server with a Unix socket and a port for TLS, too."""

    def _command(self) -> list[str | Path]:
        if not hasattr(self, "_tls"):
            self._tls = reserved_port(self.host)
        files = certificate()
        options = {
            "unixsocket": str(self.path),
            "unixsocketperm": "777",
            "tls-port": str(self.tls_port),
            "tls-cert-file": str(files / "server.crt"),
            "tls-key-file": str(files / "server.key"),
            "tls-auth-clients": "no",
        }
        return [*super()._command(), *(word for name, value in options.items() for word in (f"--{name}", value))]

    @property
    def path(self) -> Path:
        return self.data / "socket"

    @property
    def tls_port(self) -> int:
        return int(self._tls.getsockname()[1])

    def close(self) -> None:
        super().close()
        self._tls.close()


@pytest.fixture(scope="module")
def reachable() -> Iterator[Reachable]:
    started = started_or_skipped(Reachable())
    assert isinstance(started, Reachable)
    yield started
    started.close()


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_calls_over_a_unix_socket_and_tls(
    reachable: Reachable, connect: Connect, kind: str, way: str, queue: str
) -> None:
    options: dict[str, Any] = {"unix_socket_path": str(reachable.path)}
    if way == "tls":
        options = {"host": reachable.host, "port": reachable.tls_port, "ssl": True, "ssl_cert_reqs": "none"}
        options["ssl_check_hostname"] = False
        if not DIRECT:
            del options["ssl_check_hostname"]  # of newer ones
    party = connect(KINDS[kind][0], **options)
    mutex = Mutex(party.client)
    assert party(mutex.create("a", queue=queue)) == 1
    for _ in range(3):
        assert party(mutex.acquire("a", queue=queue)) is True
        assert party(mutex.acquire("a", queue=queue)) is False
        assert party(mutex.capture(3, queue=queue)) == []
        assert party(mutex.release("a", queue=queue)) is True


# What is replaced


def traced(original: Any, seen: list[Any]) -> Callable[..., Any]:
    """Return a function that notes the name of each command."""

    def execute_command(*args: Any, **options: Any) -> Any:
        seen.append(next(arg for arg in args if isinstance(arg, str)))
        return original(*args, **options)

    return execute_command


class Traced:
    """A method in a proxy, as wrapt makes one for OpenTelemetry and ddtrace: it equals what it wraps."""

    def __init__(self, wrapped: Any, seen: list[Any]) -> None:
        self.__wrapped__ = wrapped
        self._seen = seen

    def __get__(self, instance: Any, owner: Any = None) -> Traced:
        return Traced(self.__wrapped__.__get__(instance, owner), self._seen)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._seen.append(next(arg for arg in args if isinstance(arg, str)))
        return self.__wrapped__(*args, **options)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


@pytest.mark.parametrize(
    ("made", "by"),
    [("before", traced), ("before", Traced), ("after", traced), ("after", Traced)],
)
@pytest.mark.parametrize("where", ["instance", "class"])
def test_replaced_execute_command_sees_the_calls(
    connect: Connect, kind: str, queue: str, monkeypatch: pytest.MonkeyPatch, made: str, by: Any, where: str
) -> None:
    """It is called, whether the pattern object was made before or after; and not after it is restored."""
    client = KINDS[kind][0]
    party = connect(client)
    patterns = [Mutex(party.client)] if made == "before" else []
    seen: list[Any] = []
    target = client if where == "class" else party.client
    with monkeypatch.context() as patch:
        patch.setattr(target, "execute_command", by(target.execute_command, seen))
        mutex = patterns[0] if patterns else Mutex(party.client)
        party(mutex.create("a", queue=queue))
        party(mutex.acquire("a", queue=queue))
        seen.clear()
        assert party(mutex.acquire("a", queue=queue)) is False
        assert party(mutex.release("a", queue=queue)) is True
        assert seen.count("EVALSHA") == 2
    seen.clear()
    assert party(mutex.acquire("a", queue=queue)) is True
    assert seen == []


@pytest.mark.parametrize("wraps", [False, True], ids=["replaced", "wrapped"])
def test_execute_command_replaced_before_the_import_sees_the_calls(
    server: real.Redis, kind: str, queue: str, wraps: bool
) -> None:
    program = f"""
        import asyncio, functools, redis, redis.asyncio
        seen = []
        for cls in (redis.Redis, redis.asyncio.Redis):
            def patched(original):
                def execute_command(self, *args, **options):
                    seen.append(args[0])
                    return original(self, *args, **options)
                return functools.wraps(original)(execute_command) if {wraps} else execute_command
            cls.execute_command = patched(cls.execute_command)
        from sqlalchemy_locks.redis import Mutex

        def sync():
            with redis.Redis(port={server.port}) as client:
                mutex = Mutex(client)
                mutex.create("a", queue={queue!r})
                print([mutex.acquire("a", queue={queue!r}) for _ in range(3)])

        async def main():
            async with redis.asyncio.Redis(port={server.port}) as client:
                mutex = Mutex(client)
                await mutex.create("a", queue={queue!r})
                print([await mutex.acquire("a", queue={queue!r}) for _ in range(3)])

        {"sync()" if kind == "sync" else "asyncio.run(main())"}
        print(seen.count("EVALSHA"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["[True, False, False]", "4"]), done.stderr


# Failures


@pytest.mark.parametrize("executed", [False, True], ids=["unsent", "executed"])
@pytest.mark.parametrize("again", [0, 2])
def test_failed_call_is_sent_as_often_as_by_execute_command(
    connect: Connect, proxy: HoldingProxy, kind: str, queue: str, plain: redis.Redis, again: int, executed: bool
) -> None:
    client, subclass, _, _ = KINDS[kind]
    attempts, scores = {}, set()
    for each in (client, subclass):
        proxy.cut(None)
        party = connect(each, port=proxy.port, **retrying(kind, again))
        mutex = Mutex(party.client)
        party(mutex.create(each.__name__, queue=queue))
        for id in ("unknown", each.__name__):  # the script is known, and the mutex is free
            with contextlib.suppress(sl.UnknownTask):
                party(mutex.acquire(id, queue=queue))
        party(mutex.set_retries(each.__name__, 5, queue=queue))
        party(mutex.release(each.__name__, queue=queue))
        proxy.requests.clear()
        proxy.cut(b"EVALSHA", executed=executed)
        with pytest.raises(sl.OutcomeUnknown, match="no answer came from Redis"):
            party(mutex.acquire(each.__name__, queue=queue))
        copies = proxy.scripts()
        assert len({*copies}) == 1, "copies of one call"
        attempts[each] = len(copies)
        left = plain.hget(f"{key(queue)}:facts", f"retries:{each.__name__}")
        assert left == (b"4" if executed else b"5"), "at most once"
        scores.add(plain.zscore(key(queue), each.__name__))
    assert attempts == {client: 1 + again, subclass: 1 + again}
    assert scores == {1.0 if executed else 0.0}


def test_first_answer_is_returned_when_replies_are_lost(
    make: Make, server: real.Redis, queue: str, plain: redis.Redis
) -> None:
    with Proxy(server.port) as proxy:
        party, others = make(proxy.port, again=2), Mutex(plain)
        mutex = Mutex(party.client)
        party(mutex.create("a", queue=queue))
        party(mutex.acquire("a", queue=queue))
        party(mutex.release("a", queue=queue))

        def another() -> None:
            others.release("a", queue=queue)
            assert others.acquire("a", queue=queue) is True

        proxy.requests.clear()
        proxy.lose(b"EVALSHA", meanwhile=another)
        token = party(mutex.acquire_token("a", queue=queue))
        assert proxy.has_lost
        assert len([each for each in proxy.requests if b"EVALSHA" in each]) == 2
        now = plain.hget(f"{key(queue)}:facts", "fence:a")
        assert now is not None
        assert 0 < token < int(now), "the first copy's, not that of the other holder"
        assert others.release("a", queue=queue) is True


def test_error_reply_that_the_client_retries_is_retried(
    connect: Connect, kind: str, queue: str, plain: redis.Redis
) -> None:
    """``retry_on_error`` with an error of the server, as is usual for a replica that was the primary."""
    attempts = {}
    for each in KINDS[kind][:2]:
        options = {**retrying(kind, 2), "retry_on_error": [redis.exceptions.ResponseError]}
        party = connect(each, **options)
        mutex = Mutex(party.client)
        party(mutex.create("a", queue=queue))
        party(mutex.acquire("a", queue=queue))
        party(mutex.release("a", queue=queue))
        name = f"{key(queue)}:facts"
        facts = plain.hgetall(name)
        plain.delete(name)
        plain.set(name, "text")
        before = plain.info("commandstats")["cmdstat_evalsha"]["calls"]
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            party(mutex.acquire("a", queue=queue))
        attempts[each.__name__] = plain.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        plain.delete(name)
        plain.hset(name, mapping=facts)
    assert {*attempts.values()} == {3}


def limited(connect: Connect, kind: str, port: int, **options: Any) -> Party:
    """Return a client with one connection."""
    client, _, pool, retry = KINDS[kind]
    options = {"host": "127.0.0.1", "port": port, "retry": retry(NoBackoff(), 0), **options}
    return connect(client, connection_pool=pool(max_connections=1, timeout=5, **options))


@pytest.mark.parametrize("executed", [False, True], ids=["unsent", "executed"])
def test_pool_of_one_connection_serves_after_a_failed_call(
    connect: Connect, proxy: HoldingProxy, kind: str, queue: str, executed: bool
) -> None:
    party = limited(connect, kind, proxy.port)
    mutex = Mutex(party.client)
    party(mutex.create("a", "b", queue=queue))
    party(mutex.acquire("a", queue=queue))
    for _ in range(3):
        proxy.cut(b"EVALSHA", executed=executed)
        with pytest.raises(sl.OutcomeUnknown):
            party(mutex.acquire("a", queue=queue))
        proxy.cut(None)
        assert party(mutex.acquire("a", queue=queue)) is False
        assert party(mutex.acquire("b", queue=queue)) is True
        assert party(mutex.release("b", queue=queue)) is True


def test_pool_of_one_connection_serves_after_an_error_reply(connect: Connect, server: real.Redis, kind: str) -> None:
    party = limited(connect, kind, server.port)
    mutex = Mutex(party.client, prefix="of another type")
    party(mutex.create("a"))
    party(party.client.set("{of another type:a}:mutex", "text"))
    for _ in range(3):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            party(mutex.acquire("a", queue="a"))
        assert party(mutex.release("a")) is False


@pytest.mark.parametrize("waits_for", [b"EVALSHA", b"CLIENT"], ids=["reply", "connection"])
def test_call_after_a_cancelled_one_gets_its_own_answer(
    connect: Connect, proxy: HoldingProxy, queue: str, waits_for: bytes
) -> None:
    # with a timeout, redis-py calls wait_for(), which before Python 3.12 may miss a cancellation
    party = limited(connect, "async", proxy.port, socket_timeout=None)
    mutex = Mutex(party.client)
    party(mutex.create("a", "b", queue=queue))
    party(mutex.acquire("a", queue=queue))
    party(mutex.release("b", queue=queue))
    party(mutex.acquire("b", queue=queue))

    async def cancelled() -> None:
        if waits_for == b"CLIENT":
            await party.client.connection_pool.disconnect()
        proxy.hold(waits_for)
        call = asyncio.ensure_future(mutex.release("a", queue=queue))  # answers 1
        assert await asyncio.to_thread(proxy.held.wait, PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        following = asyncio.ensure_future(mutex.acquire("b", queue=queue))  # answers 0
        await asyncio.sleep(0)
        proxy.let_go()
        assert await following is False
        assert await mutex.release("b", queue=queue) is True

    party(cancelled())


def test_call_after_an_interrupted_one_gets_its_own_answer(connect: Connect, proxy: HoldingProxy, queue: str) -> None:
    """A signal handler may raise while a call waits for its reply."""
    party = limited(connect, "sync", proxy.port)
    mutex = Mutex(party.client)
    mutex.create("a", "b", queue=queue)
    mutex.acquire("a", queue=queue)
    mutex.release("b", queue=queue)
    mutex.acquire("b", queue=queue)

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        proxy.hold(b"EVALSHA")
        main = threading.main_thread().ident
        assert main is not None

        def when_held() -> None:
            proxy.held.wait(PATIENCE)
            signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=when_held)
        thread.start()
        with pytest.raises(Interrupted):
            mutex.release("a", queue=queue)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    proxy.let_go()
    assert mutex.acquire("b", queue=queue) is False
    assert mutex.release("b", queue=queue) is True


@pytest.mark.parametrize("way", ["plain client", "subclass"])
@pytest.mark.parametrize("blocking", [False, True])
def test_call_that_gets_no_connection_of_a_full_pool_was_not_sent(
    connect: Connect, kind: str, way: str, blocking: bool, queue: str, server: real.Redis
) -> None:
    """Its outcome is known: the error of the pool is raised, and not OutcomeUnknown."""
    client, subclass, limited, _ = KINDS[kind]
    unlimited = redis.ConnectionPool if kind == "sync" else redis.asyncio.ConnectionPool
    options = {"timeout": 0.1} if blocking else {}
    pool = (limited if blocking else unlimited)(host=server.host, port=server.port, max_connections=1, **options)
    party = connect(client if way == "plain client" else subclass, connection_pool=pool)
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    assert party(mutex.acquire("a", queue=queue)) is True
    taken = pool.get_connection("PING") if not DIRECT else pool.get_connection()
    taken = party(taken)
    with pytest.raises(redis.ConnectionError):
        party(mutex.release("a", queue=queue))
    if kind == "async":
        party(pool.release(taken))
    else:
        pool.release(taken)
    assert party(mutex.acquire("a", queue=queue)) is False
    assert party(mutex.release("a", queue=queue)) is True


class Interrupted(BaseException):
    """What a signal handler raises."""


@pytest.mark.parametrize("way", ["plain client", "subclass", "one connection"])
def test_call_interrupted_before_it_reads_its_reply_closes_the_connection(
    connect: Connect,
    kind: str,
    way: str,
    queue: str,
    server: real.Redis,
    plain: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next call would read the reply of the interrupted one: a mutex that is held would be acquired."""
    if kind == "async" and (way != "plain client" or not DIRECT):
        pytest.skip("the event loop interrupts a call where it waits only, which redis-py notices")
    client, subclass, _, _ = KINDS[kind]
    if way == "plain client":
        party = limited(connect, kind, server.port)
    else:
        party = connect(client if way == "one connection" else subclass, single_connection_client=way != "subclass")
    mutex, pool = Mutex(party.client), party.client.connection_pool
    party(mutex.create("a", queue=queue))
    for call in (mutex.acquire, mutex.release, mutex.acquire):  # the server knows the scripts
        assert party(call("a", queue=queue)) is True
    connection = party.client.connection or party(pool.get_connection("PING") if not DIRECT else pool.get_connection())
    if kind == "async":
        party(pool.release(connection))
    elif party.client.connection is None:
        pool.release(connection)

    def interrupt(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(connection, "read_response", interrupt)
        with pytest.raises(Interrupted):
            party(mutex.release("a", queue=queue))
    closed = not connection.is_connected if kind == "async" else connection._sock is None
    assert closed
    until(lambda: plain.zscore(key(queue), "a") == 0)
    assert party(mutex.acquire("a", queue=queue)) is True
    assert party(mutex.acquire("a", queue=queue)) is False


# What is sent and read


def test_texts_and_numbers_are_sent_and_read_as_they_are(party: Party, queue: str) -> None:
    mutex, timeout = Mutex(party.client), Timeout(party.client, every=3600.0)
    tasks = StateTransition(party.client, ready=("готово", "étape"), captured="en cours ☃")
    ids, owner = ["\r\n$5\r\n", "é", "日本 語", "😀" * 60], "ключ\r\n*1"
    assert party(mutex.create(*ids, queue=queue, retries=2_147_483_647)) == 4
    for _ in range(2):
        for id in ids:
            assert party(mutex.acquire(id, owner=owner, queue=queue)) is True
            assert party(mutex.release(id, owner="other", queue=queue)) is False
        assert {(each.id, each.owner) for each in party(mutex.held(queue=queue))} == {(id, owner) for id in ids}
        for id in ids:
            assert party(mutex.release(id, owner=owner, queue=queue)) is True
    assert party(mutex.capture(2**31 - 1, queue=queue)) == sorted(ids)
    assert party(timeout.create(*ids, queue=queue, retries=3)) == 4
    assert party(timeout.acquire(ids[3], queue=queue)) is True
    assert {(each.id, each.every, each.retries) for each in party(timeout.listed(queue=queue))} == {
        (id, 3600, 2 if id == ids[3] else 3) for id in ids
    }
    assert party(tasks.create(*ids, queue=queue, timeout=60, retries=0)) == 4
    assert party(tasks.create("x", queue=queue, timeout=60, retries=7)) == 1
    for left in (6, 5):
        (task,) = party(tasks.capture(9, queue=queue))
        assert (task.id, task.status, task.timeout, task.retries_left) == ("x", "en cours ☃", 60, left)
        assert party(tasks.set_status("x", "étape", claim=task.claim, queue=queue)) is True


def test_a_client_of_another_encoding(connect: Connect, kind: str, queue: str, plain: redis.Redis) -> None:
    """Texts are stored as UTF-8 by every client."""
    party = connect(KINDS[kind][0], encoding="latin-1", decode_responses=True)
    mutex = Mutex(party.client)
    for _ in range(2):
        party(mutex.create("日é", queue=queue, retries=2))
    assert party(mutex.capture(3, queue=queue, owner="é")) == ["日é"]
    assert [(each.id, each.owner) for each in Mutex(plain).held(queue=queue)] == [("日é", "é")]


def check_is_due(party: Party) -> None:
    """Make the client check its connections at the next call."""
    (connection,) = party.client.connection_pool._available_connections
    connection.next_health_check = -1


def test_health_checks_are_made(make: Make, proxy: HoldingProxy, queue: str) -> None:
    party = make(proxy.port, health_check_interval=3600)
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    party(mutex.acquire("a", queue=queue))
    party(mutex.release("a", queue=queue))
    for call in (mutex.acquire, mutex.release):
        check_is_due(party)
        proxy.requests.clear()
        assert party(call("a", queue=queue)) is True
        assert [b"PING" in request for request in proxy.requests].index(True) == 0
        assert sum(b"PING" in request for request in proxy.requests) == 1
        assert len(proxy.scripts()) == 1


def test_failed_health_check_is_followed_by_a_new_connection(make: Make, proxy: HoldingProxy, queue: str) -> None:
    party = make(proxy.port, again=1, health_check_interval=3600)
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    party(mutex.acquire("a", queue=queue))
    party(mutex.release("a", queue=queue))
    check_is_due(party)
    proxy.cut(b"PING", once=True)
    assert party(mutex.acquire("a", queue=queue)) is True, "a new connection is not checked"
    assert any(b"PING" in request for request in proxy.requests)


def test_unknown_script_is_sent_in_full(make: Make, proxy: HoldingProxy, queue: str, plain: redis.Redis) -> None:
    party = make(proxy.port)
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    party(mutex.acquire("a", queue=queue))
    plain.script_flush()
    proxy.requests.clear()
    assert party(mutex.capture(1, queue=queue)) == []
    assert party(mutex.release("a", queue=queue)) is True
    assert party(mutex.release("a", queue=queue)) is False
    requests = [request for request in proxy.requests if _ASK_TIME not in request]
    kinds = ["EVALSHA" if b"EVALSHA" in each else "EVAL" for each in requests if b"EVAL" in each]
    assert kinds == ["EVALSHA", "EVAL", "EVALSHA", "EVAL", "EVALSHA"]


def test_call_through_execute_command_is_one_round_trip(
    connect: Connect, proxy: HoldingProxy, kind: str, queue: str
) -> None:
    party = connect(KINDS[kind][1], port=proxy.port)
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    party(mutex.acquire("a", queue=queue))
    proxy.requests.clear()
    assert party(mutex.acquire("a", queue=queue)) is False
    assert len(proxy.requests) == 1


# Processes and threads


def test_each_process_has_its_own_connection_after_a_fork(connect: Connect, queue: str) -> None:
    client = connect(redis.Redis).client
    mutex = Mutex(client)
    mutex.create("child", "parent", queue=queue)
    mutex.acquire("child", queue=queue)  # the connection, the clock and the script are known before the fork
    mutex.release("child", queue=queue)

    def rounds(id: str) -> bool:
        told = []
        for _ in range(100):
            told += [mutex.acquire(id, queue=queue), mutex.acquire(id, queue=queue), mutex.release(id, queue=queue)]
        return told == [True, False, True] * 100

    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(go, b"1")
            code = 0 if rounds("child") else 2
        finally:
            os._exit(code)
    assert os.read(ready, 1) == b"1"
    assert rounds("parent")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(ready)
    os.close(go)


CALLERS = 8
ROUNDS = 30
EXPECTED = [True, False, True] * ROUNDS


def test_threads_share_a_client(connect: Connect, queue: str) -> None:
    mutex = Mutex(connect(redis.Redis).client)
    mutex.create(*map(str, range(CALLERS)), queue=queue)
    barrier = threading.Barrier(CALLERS, timeout=PATIENCE)

    def caller(number: int) -> list[bool]:
        barrier.wait()
        told, id = [], str(number)
        for _ in range(ROUNDS):
            told += [mutex.acquire(id, queue=queue), mutex.acquire(id, queue=queue), mutex.release(id, queue=queue)]
        return told

    with ThreadPoolExecutor(CALLERS) as threads:
        assert list(threads.map(caller, range(CALLERS))) == [EXPECTED] * CALLERS


def test_tasks_share_a_client(connect: Connect, queue: str) -> None:
    party = connect(redis.asyncio.Redis)
    mutex = Mutex(party.client)
    party(mutex.create(*map(str, range(CALLERS)), queue=queue))

    async def caller(id: str) -> list[bool]:
        told = []
        for _ in range(ROUNDS):
            for call in (mutex.acquire, mutex.acquire, mutex.release):
                told.append(await call(id, queue=queue))
        return told

    async def together() -> list[list[bool]]:
        callers: list[Coroutine[Any, Any, list[bool]]] = [caller(str(number)) for number in range(CALLERS)]
        return await asyncio.gather(*callers)

    assert party(together()) == [EXPECTED] * CALLERS


# Answers, and copies of a call


def test_answers_always_expire(party: Party, queue: str, plain: redis.Redis) -> None:
    mutex = Mutex(party.client)
    party(mutex.create("a", queue=queue))
    for _ in range(3):
        party(mutex.acquire("a", queue=queue))
        party(mutex.release("a", queue=queue))
        with pytest.raises(sl.UnknownTask):
            party(mutex.release("unknown", queue=queue))
        kept = answers_of(plain, queue)
        assert kept
        for name, answers in kept.items():
            assert 0 < plain.pttl(name) <= 72_000
            assert b"expires" in answers


def at_deadline(mutex: Mutex[Any], script: Any, queue: str, deadline: int) -> tuple[bytes, bytes]:
    """Return a call of ``a`` with a deadline, as it is sent, and the name of the hash of its answer."""
    estimate = mutex._calls._estimate
    assert estimate is not None
    try:
        mutex._calls._estimate = deadline - LATE - time.monotonic() + 0.1, estimate[1]
        command = mutex._calls.command(script, mutex._keys(queue), (b"a",))
    finally:
        mutex._calls._estimate = estimate
    assert command is not None
    return _packed(command), command[0][-1]


def sent(server: real.Redis, *requests: bytes) -> list[bytes]:
    """Send requests on one raw connection, and return their replies."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as raw:
        replies = []
        for request in requests:
            raw.sendall(request)
            replies.append(raw.recv(1 << 16))
        return replies


@pytest.fixture
def mutex(plain: redis.Redis, queue: str) -> Mutex[Any]:
    """A mutex ``a``, free; its scripts are known to the server."""
    mutex = Mutex(plain)
    mutex.create("a", queue=queue, retries=50)
    mutex.acquire("a", queue=queue)
    mutex.release("a", queue=queue)
    return mutex


@pytest.mark.parametrize("offset", range(10))
def test_hash_expires_after_the_last_deadline_of_its_window(
    mutex: Mutex[Any], server: real.Redis, queue: str, plain: redis.Redis, offset: int
) -> None:
    start = plain.time()[0] // 10 * 10 + 50
    first, name = at_deadline(mutex, _ACQUIRE, queue, start + offset)
    assert name == f"{key(queue)}:calls:{start // 10}".encode()
    assert plain.exists(name) == 0
    (reply,) = sent(server, first)
    assert int(reply[1:]) > 1
    expires = plain.execute_command("PEXPIRETIME", name)
    assert expires == (start + 11) * 1000
    # a second call of the window leaves that as it is
    second, same = at_deadline(mutex, _RELEASE, queue, start + 9 - offset)
    assert same == name
    assert sent(server, second) == [b":1\r\n"]
    assert plain.execute_command("PEXPIRETIME", name) == expires
    assert plain.hlen(name) == 3


def test_late_call_creates_no_hash(mutex: Mutex[Any], server: real.Redis, queue: str, plain: redis.Redis) -> None:
    late, name = at_deadline(mutex, _ACQUIRE, queue, plain.time()[0] - 1)
    plain.delete(name)
    before = state(plain, queue)
    assert sent(server, late, late) == [b":-2\r\n"] * 2
    assert state(plain, queue) == before
    assert plain.exists(name) == 0


def test_resent_copy_returns_the_first_answer(
    mutex: Mutex[Any], server: real.Redis, queue: str, plain: redis.Redis
) -> None:
    deadline = plain.time()[0] + LATE
    acquire, _ = at_deadline(mutex, _ACQUIRE, queue, deadline)
    first, second = sent(server, acquire, acquire)
    assert first == second
    assert int(first[1:]) > 1
    before = state(plain, queue)
    assert sent(server, acquire) == [first]
    assert state(plain, queue) == before
    # after another holder's call
    assert mutex.release("a", queue=queue) is True
    before = state(plain, queue)
    assert sent(server, acquire) == [first]
    assert state(plain, queue) == before
    assert mutex.acquire("a", queue=queue) is True
    release, _ = at_deadline(mutex, _RELEASE, queue, deadline)
    assert sent(server, release) == [b":1\r\n"]
    assert mutex.acquire("a", queue=queue) is True
    before = state(plain, queue)
    assert sent(server, release, acquire) == [b":1\r\n", first]
    assert state(plain, queue) == before, "the next holder has it still"


def test_copy_whose_answer_has_expired_changes_nothing(
    mutex: Mutex[Any], server: real.Redis, queue: str, plain: redis.Redis
) -> None:
    release, name = at_deadline(mutex, _RELEASE, queue, plain.time()[0] - 1)
    mutex.acquire("a", queue=queue)
    plain.hset(name, "expires", 1)  # as an earlier call of the window left it
    assert sent(server, release, release) == [b":1\r\n"] * 2
    assert mutex.acquire("a", queue=queue) is True
    plain.delete(name)
    before = state(plain, queue)
    assert sent(server, release) == [b":-2\r\n"]
    assert state(plain, queue) == before
    assert mutex.acquire("a", queue=queue) is False

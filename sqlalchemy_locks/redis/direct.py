"""Commands on a connection of the client's pool, without ``execute_command``, which takes as long as the server does.

A failure is retried as ``execute_command`` does it: by the retry policy of the connection, whose first attempt it was.

This relies on undocumented behaviour of redis-py 6 and newer, which ``tests/redis/test_direct.py`` verifies: the
methods of pools and connections, and that ``execute_command`` does nothing else for a script but to record metrics.
Where that may not hold, it is called.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import RedisError

#: A command as ``execute_command`` takes it, in two parts: what many calls have in common, the name and bytes; and the
#: other arguments, bytes and numbers.
Command = tuple[tuple[Any, ...], tuple[Any, ...]]


_VERSION = int(redis.__version__.partition(".")[0])
#: the connections that do no more than send and read, by the class of the client and the module that it is of
_CONNECTIONS = {
    (module.Redis, f"{module.__name__}.client"): (
        module.connection.Connection,
        module.connection.SSLConnection,
        module.connection.UnixDomainSocketConnection,
    )
    for module in (redis, redis.asyncio)
}
#: the method of each client's class, as it was imported
_METHODS = {kind: kind.execute_command for kind, _ in _CONNECTIONS}


def plain_method(client: Any) -> Any:
    """Return ``execute_command`` of a client that, as it was made, does no more for a script than to send and read.

    ``None`` for any other: a subclass, one of a cluster or a sentinel, with a single connection or a cache, one whose
    method was replaced before, and where the app collects metrics.
    """
    kind = type(client)
    module = kind.__module__
    connections, method = _CONNECTIONS.get((kind, module), ()), _METHODS.get(kind)
    if not connections or _VERSION < 6 or method.__module__ != module or hasattr(method, "__wrapped__"):
        return None
    pool = client.connection_pool
    if client.connection is not None or getattr(client, "single_connection_client", False):
        return None
    if getattr(pool, "connection_class", None) not in connections or getattr(pool, "cache", None) is not None:
        return None
    try:
        metrics: Any = importlib.import_module("redis.observability.providers")
    except ImportError:  # before redis-py 7.2
        return method
    return None if metrics.get_observability_instance().is_enabled() else method


def disconnect_idle(client: Any) -> None:
    """Disconnect what a synchronous client is not using, after ``execute_command`` was interrupted.

    The pool of redis-py may have taken back a connection whose answer is unread.
    """
    # not isinstance(), by which mypy would see methods that have no types in redis-py 5
    if issubclass(type(client), redis.RedisCluster):
        client.disconnect_connection_pools()
        return
    if client.connection is not None:
        client.connection.disconnect()
    pool = client.connection_pool
    if issubclass(type(pool), redis.BlockingConnectionPool):
        pool.disconnect()  # those in use, too: their calls are sent again
    else:
        pool.disconnect(inuse_connections=False)


def send(client: Any, command: Command, raw: bool) -> Any:
    """Send a command, and return its answer.

    :param raw: the answer stays bytes, whatever the client's ``decode_responses`` is.
    """
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        try:
            connection.send_packed_command([_packed(command)])
            return connection.read_response(disable_decoding=raw)
        except RedisError as error:
            errors = [error]

        def attempt() -> Any:
            if errors:
                raise errors.pop()
            connection.send_packed_command([_packed(command)])
            return connection.read_response(disable_decoding=raw)

        return connection.retry.call_with_retry(attempt, lambda _: connection.disconnect())
    except RedisError:
        raise
    except BaseException:
        connection.disconnect()  # its answer is unread, and would be taken for that of the next call
        raise
    finally:
        pool.release(connection)


async def send_async(client: Any, command: Command, raw: bool) -> Any:
    """As :func:`send`, by an asynchronous client."""
    pool = client.connection_pool
    connection = await pool.get_connection()
    try:
        try:
            await connection.send_packed_command([_packed(command)])
            return await connection.read_response(disable_decoding=raw)
        except RedisError as error:
            errors = [error]

        async def attempt() -> Any:
            if errors:
                raise errors.pop()
            await connection.send_packed_command([_packed(command)])
            return await connection.read_response(disable_decoding=raw)

        return await connection.retry.call_with_retry(attempt, lambda _: connection.disconnect())
    except RedisError:
        raise
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


def _packed(command: Command) -> bytes:
    """Return a command as the server reads it: an array of texts, each after its length."""
    constant, arguments = command
    return b"*%d\r\n%b%b" % (len(constant) + len(arguments), _texts_kept(constant), _texts(arguments))


def _texts(parts: tuple[Any, ...]) -> bytes:
    given = [part if type(part) is bytes else str(part).encode() for part in parts]
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in given])


_texts_kept = functools.lru_cache(maxsize=1024)(_texts)

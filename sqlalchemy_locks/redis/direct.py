"""Commands on a connection of the client's pool, without ``execute_command``, which takes as long as the server does.

A failure is retried as ``execute_command`` does it: by the retry policy of the connection, whose first attempt it was.

This relies on undocumented behaviour of redis-py 6 and newer, which ``tests/redis/test_direct.py`` verifies: the
methods of pools and connections, and that ``execute_command`` does nothing else for a script but to record metrics.
Where that may not hold, it is called.
"""

from __future__ import annotations

import functools
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ConnectionError, TimeoutError

#: A command as ``execute_command`` takes it, in two parts: what many calls have in common, the name and bytes; and the
#: other arguments, bytes and numbers.
Command = tuple[tuple[Any, ...], tuple[Any, ...]]


_VERSION = int(redis.__version__.partition(".")[0])
_LOST = (ConnectionError, TimeoutError)
#: a client's class, its own method, and the connections that do no more than send and read
_KNOWN = {
    module.Redis: (
        module.Redis.execute_command,
        (
            module.connection.Connection,
            module.connection.SSLConnection,
            module.connection.UnixDomainSocketConnection,
        ),
    )
    for module in (redis, redis.asyncio)
}


def sends_directly(client: Any) -> bool:
    """Return whether a client, as it was made, does no more for a script than to send it and read the answer.

    Not a cluster's, a sentinel's, one with a single connection or a cache, nor where the app collects metrics.
    """
    if type(client) not in _KNOWN or _VERSION < 6:
        return False
    method, connections = _KNOWN[type(client)]
    # patched before this module was imported
    if method.__module__ != type(client).__module__ or hasattr(method, "__wrapped__"):
        return False
    pool = client.connection_pool
    if client.connection is not None or getattr(client, "single_connection_client", False):
        return False
    if getattr(pool, "connection_class", None) not in connections or getattr(pool, "cache", None) is not None:
        return False
    try:
        from redis.observability.providers import get_observability_instance
    except ImportError:  # before redis-py 7.2
        return True
    return not get_observability_instance().is_enabled()


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
        except _LOST as error:
            errors = [error]

        def attempt() -> Any:
            if errors:
                raise errors.pop()
            connection.send_packed_command([_packed(command)])
            return connection.read_response(disable_decoding=raw)

        return connection.retry.call_with_retry(attempt, lambda _: connection.disconnect())
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
        except _LOST as error:
            errors = [error]

        async def attempt() -> Any:
            if errors:
                raise errors.pop()
            await connection.send_packed_command([_packed(command)])
            return await connection.read_response(disable_decoding=raw)

        return await connection.retry.call_with_retry(attempt, lambda _: connection.disconnect())
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

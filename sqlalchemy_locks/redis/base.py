"""The base of the three patterns: a client, the keys of a queue, and a decorator that makes an operation a method.

All keys of a queue have one hash tag, ``{sqlalchemy_locks:<queue>}``, so that they are in one slot of a cluster:

- ``...:<pattern>`` is a sorted set: each id, scored by its state;
- ``...:<pattern>:facts`` is a hash of retries, owners, fences and periods; a field is named by kind and id;
- ``...:<pattern>:calls:<number>`` is a hash of the answers to ten seconds' calls (see :mod:`.client`), which expires.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import redis
import redis.asyncio
from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.asyncio.cluster import ClusterPipeline as AsyncClusterPipeline
from redis.client import Pipeline
from redis.cluster import ClusterPipeline

from sqlalchemy_locks._validation import valid_int, valid_name
from sqlalchemy_locks.redis.client import RedisScript, ScriptCalls

P = ParamSpec("P")
R = TypeVar("R")
Values = tuple[Any, ...]
#: a script, the queue, the script's values, and the decoder of its answer
Call = tuple[RedisScript, "str | None", Values, Callable[[Any], R]]
Sync = redis.Redis | redis.RedisCluster
Async = redis.asyncio.Redis | redis.asyncio.RedisCluster
Client = TypeVar("Client", bound=Sync | Async, covariant=True)

_PIPELINES = (Pipeline, ClusterPipeline, AsyncPipeline, AsyncClusterPipeline)
_CLIENTS = (redis.Redis, redis.RedisCluster, redis.asyncio.Redis, redis.asyncio.RedisCluster)


class _Method(Generic[P, R]):
    """A method of a pattern, as type checkers see it: with an asynchronous client its result is awaited."""

    @overload
    def __get__(self, pattern: Pattern[Sync], kind: Any = None) -> Callable[P, R]: ...
    @overload
    def __get__(self, pattern: Pattern[Async], kind: Any = None) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, pattern: Any, kind: Any = None) -> Any:
        raise NotImplementedError


def operation(describe: Callable[Concatenate[Any, P], Call[R]]) -> _Method[P, R]:
    """Turn a function that describes a call into a method that makes it."""

    @functools.wraps(describe)
    def method(self: Pattern[Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        script, queue, values, decode = describe(self, *args, **kwargs)
        call = self._calls.call(script, self._keys(queue), values, decode)
        return call if self._calls.awaited else _finished(call)

    return cast(_Method[P, R], method)


def _finished(call: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end, without an event loop, since nothing in it waits."""
    try:
        call.send(None)
    except StopIteration as returned:
        return cast(R, returned.value)
    raise AssertionError("a call by a synchronous client waits for nothing")


_CREATE = RedisScript(
    "create",
    """
  local created = 0
  for i = 4, #ARGV do
    if redis.call('ZADD', scores, 'NX', 0, ARGV[i]) == 1 then
      created = created + 1
      if ARGV[2] ~= '' then redis.call('HSET', facts, 'retries:' .. ARGV[i], ARGV[2]) end
      if ARGV[3] ~= '' then redis.call('HSET', facts, 'timeout:' .. ARGV[i], ARGV[3]) end
    end
  end
  return created
""",
)
_SET_RETRIES = RedisScript(
    "set_retries",
    """
  local id, retries = ARGV[2], ARGV[3]
  if not redis.call('ZSCORE', scores, id) then return -1 end
  if retries == '' then
    redis.call('HDEL', facts, 'retries:' .. id)
  else
    redis.call('HSET', facts, 'retries:' .. id, retries)
  end
  return 1
""",
)


class Pattern(Generic[Client]):
    """A pattern on one server, or one cluster."""

    #: the name of the pattern in its keys
    kind: ClassVar[str]
    #: the suffixes of its keys; the key of the states has none
    _suffixes: ClassVar[tuple[str, ...]] = (":facts",)

    def __init__(self, client: Client, *, prefix: str = "sqlalchemy_locks") -> None:
        name = type(self).__name__
        if isinstance(client, _PIPELINES):
            raise TypeError(f"redis.{name} takes the client itself: a pipeline returns no answers until it is executed")
        if not isinstance(client, _CLIENTS):
            raise TypeError(
                f"redis.{name} takes a redis.Redis, a redis.asyncio.Redis, or their RedisCluster, not {client!r}; for "
                "a lock that is part of a SQL transaction use sqlalchemy_locks.lock"
            )
        self._prefix = valid_name(prefix, "a prefix")
        if "{" in prefix or "}" in prefix:
            raise ValueError(f"a prefix has no braces, which Redis Cluster would read: {prefix!r}")
        if ":" in prefix:
            # the queue 'b:c' under the prefix 'a' would have the keys of the queue 'c' under the prefix 'a:b'
            raise ValueError(f"a prefix has no colon, which ends it in a key: use another separator than in {prefix!r}")
        self._calls = ScriptCalls(client)

    def _keys(self, queue: str | None) -> list[bytes]:
        key = f"{{{self._prefix}:{as_queue(queue)}}}:{self.kind}"
        return [f"{key}{suffix}".encode() for suffix in ("", *self._suffixes)]

    @operation
    def set_retries(self, id: str, retries: int | None, *, queue: str | None = None) -> Call[bool]:
        """Set how many acquisitions are left.

        :param retries: their number; ``None``: unlimited.
        :return: ``True``.
        :raises UnknownTask: when the id was never created.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.set_retries("task_a", 3)
        True
        """
        return _SET_RETRIES, queue, (as_id(id), as_retries(retries)), bool


def create_call(ids: Sequence[str], queue: str | None, retries: int | None, timeout: Any = b"") -> Call[int]:
    """Describe the call of ``create``."""
    return _CREATE, queue, (as_retries(retries), timeout, *as_ids(ids)), int


def decode_token(answer: int) -> int | None:
    """Return a fencing token, or ``None`` where nothing was acquired."""
    return answer or None


def decode_ids(answer: list[bytes]) -> list[str]:
    """Return captured ids."""
    return [id.decode() for id in answer]


def as_ids(ids: Sequence[str]) -> list[bytes]:
    if not ids:
        raise ValueError("create needs at least one id")
    return [as_id(id) for id in ids]


def as_id(id: Any) -> bytes:
    return valid_name(id, "an id").encode()


def as_owner(owner: Any) -> tuple[bytes, ...]:
    """Return the owner as script arguments: none without an owner."""
    return () if owner is None else (valid_name(owner, "an owner").encode(),)


def as_queue(queue: Any) -> str:
    return "default" if queue is None else valid_name(queue, "a queue")


def as_retries(retries: Any) -> Any:
    return b"" if retries is None else valid_int(retries, "retries", 0)

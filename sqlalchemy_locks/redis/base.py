"""What the three patterns share: a client, the keys of a queue, and how an operation becomes a method.

All keys of a queue have one hash tag, ``{sqlalchemy_locks:<queue>}``, so that they are in one slot of a cluster:

- ``...:<pattern>`` is a sorted set: each id, and as its score the state;
- ``...:<pattern>:facts`` is a hash: retries, owners, fences and periods, each field named by what it is and the id;
- ``...:<pattern>:calls:<number>`` is a hash: the answers of ten seconds' calls (see :mod:`.call`), gone soon after.
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
from redis.exceptions import NoScriptError, RedisError

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.redis.client import Calls, Keys, RedisScript, translated

P = ParamSpec("P")
R = TypeVar("R")
Values = tuple[Any, ...]
Call = tuple[RedisScript, "str | None", Values, Callable[[Any], R]]
Sync = redis.Redis | redis.RedisCluster
Async = redis.asyncio.Redis | redis.asyncio.RedisCluster
Client = TypeVar("Client", bound=Sync | Async, covariant=True)

_PIPELINES = (Pipeline, ClusterPipeline, AsyncPipeline, AsyncClusterPipeline)
_SYNC = (redis.Redis, redis.RedisCluster)
_ASYNC = (redis.asyncio.Redis, redis.asyncio.RedisCluster)


class _Method(Generic[P, R]):
    """A method of a pattern, as type checkers see it: with an asynchronous client its result is awaited."""

    @overload
    def __get__(self, pattern: Pattern[Sync], kind: Any = None) -> Callable[P, R]: ...
    @overload
    def __get__(self, pattern: Pattern[Async], kind: Any = None) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, pattern: Any, kind: Any = None) -> Any:
        raise NotImplementedError


def operation(body: Callable[Concatenate[Any, P], Call[R]]) -> _Method[P, R]:
    """Make a method of what is called for: a script, a queue, the script's values, and what to make of its answer."""

    @functools.wraps(body)
    def method(self: Pattern[Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        script, queue, values, read = body(self, *args, **kwargs)
        return self._drive(self._client, self._calls, script, self._keys(queue), values, read)

    return cast(_Method[P, R], method)


def _driven(client: Any, calls: Calls, script: RedisScript, keys: Keys, values: Values, read: Callable[[Any], R]) -> R:
    command = calls.command(script, keys, values)
    while command is None:
        calls.learn(client.execute_command(*calls.question(keys)))
        command = calls.command(script, keys, values)
    try:
        try:
            answer = client.execute_command(*command, **script.options)
        except NoScriptError:
            answer = client.execute_command(*script.whole(command), **script.options)
    except RedisError as error:
        ours = translated(script, error)
        if ours is error:
            raise
        raise ours from error
    return read(calls.told(script, keys, values, answer))


async def _awaited(
    client: Any, calls: Calls, script: RedisScript, keys: Keys, values: Values, read: Callable[[Any], R]
) -> R:
    command = calls.command(script, keys, values)
    while command is None:
        calls.learn(await client.execute_command(*calls.question(keys)))
        command = calls.command(script, keys, values)
    try:
        try:
            answer = await client.execute_command(*command, **script.options)
        except NoScriptError:
            answer = await client.execute_command(*script.whole(command), **script.options)
    except RedisError as error:
        ours = translated(script, error)
        if ours is error:
            raise
        raise ours from error
    return read(calls.told(script, keys, values, answer))


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

    kind: ClassVar[str]
    #: of the keys beside that of the states
    _suffixes: ClassVar[tuple[bytes, ...]] = (b":facts",)

    def __init__(self, client: Client, *, prefix: str = "sqlalchemy_locks") -> None:
        name = type(self).__name__
        if isinstance(client, _PIPELINES):
            raise TypeError(f"redis.{name} takes the client itself: a pipeline answers only when it is executed")
        if not isinstance(client, (*_SYNC, *_ASYNC)):
            raise TypeError(
                f"redis.{name} takes a redis.Redis, a redis.asyncio.Redis, or their RedisCluster, not {client!r}; what "
                "is to be part of a SQL transaction is sqlalchemy_locks.lock"
            )
        self._client: Any = client
        self._drive: Any = _awaited if isinstance(client, _ASYNC) else _driven
        self._prefix = valid_name(prefix, "a prefix")
        if "{" in prefix or "}" in prefix:
            raise ValueError(f"a prefix has no braces, which Redis Cluster would read: {prefix!r}")
        self._calls = Calls()
        self._keys = functools.lru_cache(maxsize=1024)(self._keys_of)

    def _keys_of(self, queue: str | None) -> Keys:
        start = f"{{{self._prefix}:{as_queue(queue)}}}:{self.kind}".encode()
        names = (start, *(start + suffix for suffix in self._suffixes))
        return Keys(start, names, b"%d" % (1 + len(names)))

    @operation
    def set_retries(self, id: str, retries: int | None, *, queue: str | None = None) -> Call[bool]:
        """Say how many acquisitions are left; ``None``: as many as you like.

        :return: ``True``. :raises UnknownTask: when it was never created.

        >>> mutex = Mutex(redis.Redis())
        >>> mutex.create("task_a")
        1
        >>> mutex.set_retries("task_a", 3)
        True
        """
        return _SET_RETRIES, queue, (as_id(id), as_retries(retries)), bool


def created(ids: Sequence[str], queue: str | None, retries: int | None, timeout: Any = b"") -> Call[int]:
    """What ``create`` calls for."""
    return _CREATE, queue, (as_retries(retries), timeout, *as_ids(ids)), int


def token(answer: int) -> int | None:
    return answer or None


def names(answer: list[bytes]) -> list[str]:
    return [id.decode() for id in answer]


def as_ids(ids: Sequence[str]) -> list[bytes]:
    if not ids:
        raise ValueError("create needs at least one id")
    return [as_id(id) for id in ids]


@functools.lru_cache(maxsize=1024)
def as_id(id: Any) -> bytes:
    return valid_name(id, "an id").encode()


@functools.lru_cache(maxsize=1024)
def as_owner(owner: Any) -> tuple[bytes, ...]:
    """Nothing at all for nobody: an argument less is a microsecond less."""
    return () if owner is None else (valid_name(owner, "an owner").encode(),)


def as_queue(queue: Any) -> str:
    return "default" if queue is None else valid_name(queue, "a queue")


def as_retries(retries: Any) -> Any:
    if retries is None:
        return b""
    if isinstance(retries, bool) or not isinstance(retries, int):
        raise TypeError(f"retries is a number or None, not {retries!r}")
    if not 0 <= retries < 2**31:
        raise ValueError(f"retries must be at least 0 and fit into an integer, not {retries}")
    return int(retries)


def as_limit(limit: Any) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit is a number, not {limit!r}")
    if not 1 <= limit < 2**31:
        raise ValueError(f"limit must be at least 1, not {limit}")
    return int(limit)

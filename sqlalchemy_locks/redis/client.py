"""One call of one script: it takes effect at most once, even when its reply is lost.

redis-py resends a command when its connection dies, without knowing whether the first copy was executed. Each call
therefore carries a nonce, and its script stores its answer under that nonce: a second copy returns the stored answer.

Answers expire. A copy that arrives afterwards is *late* and changes nothing. The server's clock decides, against the
deadline that the call itself carries. The client estimates that clock to compute the deadline: a wrong estimate can
make a call late, but never execute it twice.

Assumed of the server: a script runs alone, and its effects reach replicas and the append-only file together (Redis 5
and newer).

:meth:`ScriptCalls.steps` is the only implementation. It yields commands and receives their replies, so it serves
``redis`` and ``redis.asyncio`` alike; the two runners in :mod:`.base` only send them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from redis.client import NEVER_DECODE
from redis.exceptions import (
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from sqlalchemy_locks.errors import NotWritable, OutcomeUnknown, UnknownTask
from sqlalchemy_locks.redis.direct import Command

R = TypeVar("R")

#: A copy of a call that arrives more than this many seconds after the call was made may be late.
LATE = 60
#: Answers of all calls within this many seconds share one hash, which expires when the last of them would be late.
_SECONDS_PER_HASH = 10
#: Seconds for which an estimate of the server's clock is used: two quartz clocks drift apart by less than a second.
_ESTIMATE_LIFETIME = 3600
#: What scripts return instead of an answer.
_UNKNOWN_ID, _LATE_CALL = -1, -2

_ASK_TIME = b"return redis.call('TIME')[1]"
_PROLOGUE = """\
local calls, call = KEYS[#KEYS], ARGV[1]
local answered = redis.call('HMGET', calls, call, 'expires')
if answered[1] then return cmsgpack.unpack(answered[1]) end

local time
local function now()
  time = time or redis.call('TIME')
  return time
end

-- While the hash exists, the answer to an earlier copy would be in it.
local latest
if not answered[2] then
  latest = tonumber(string.sub(call, 1, -13))
  if tonumber(now()[1]) > latest then return -2 end
end

local scores, facts = KEYS[1], KEYS[2]

local function operation()
"""
_EPILOGUE = f"""\
end

local answer = operation()
if answered[2] then
  redis.call('HSET', calls, call, cmsgpack.pack(answer))
else
  redis.call('HSET', calls, call, cmsgpack.pack(answer), 'expires', 1)
  redis.call('EXPIREAT', calls, latest - latest % {_SECONDS_PER_HASH} + {_SECONDS_PER_HASH + 1})
end
return answer
"""


#: Lua helpers of the scripts that acquire. Only those include them: a script defines its functions at each call.
ACQUISITION = """
  -- The retries that are left and the last fencing token; false where not stored.
  local function limits(id)
    return redis.call('HMGET', facts, 'retries:' .. id, 'fence:' .. id)
  end

  -- Spend a retry, store the owner, and return a new fencing token. The token is greater than any earlier one, even
  -- after the server has lost its data.
  local function record(id, known, owner)
    if known[1] then redis.call('HINCRBY', facts, 'retries:' .. id, -1) end
    local seconds, micros = unpack(now())
    local token = math.max((tonumber(known[2]) or 0) + 1, seconds * 1000000 + micros)
    redis.call('HSET', facts, 'fence:' .. id, string.format('%d', token), 'owner:' .. id, owner or '')
    return token
  end
"""
#: Lua helpers of the scripts that capture several ids.
CAPTURE = (
    ACQUISITION
    + """
  -- The first ids with a score between two bounds that have a retry left and match the filter, if any.
  local function first(limit, lowest, highest, filter)
    local count = limit
    while true do
      local ids = {}
      local rows = redis.call('ZRANGEBYSCORE', scores, lowest, highest, 'WITHSCORES', 'LIMIT', 0, count)
      for i = 1, #rows, 2 do
        if limits(rows[i])[1] ~= '0' and (not filter or filter(rows[i], tonumber(rows[i + 1]))) then
          ids[#ids + 1] = rows[i]
          if #ids == limit then return ids end
        end
      end
      if #rows < 2 * count then return ids end
      count = count * 4
    end
  end
"""
)


class RedisScript:
    """A Lua script that is executed once per call.

    :param name: the operation, as error messages name it.
    :param body: Lua; it may use ``scores``, ``facts``, ``now()`` and the helpers.
    :param helpers: Lua functions that the body calls.
    :param returns_list: the answer is a list of bytes, whatever the client's ``decode_responses`` is.
    """

    def __init__(self, name: str, body: str, *, helpers: str = "", returns_list: bool = False) -> None:
        self.name = name
        self.body = body
        self.options: dict[str, Any] = {NEVER_DECODE: True} if returns_list else {}
        self._compile(f"{_PROLOGUE}{helpers}{body}{_EPILOGUE}")

    def _compile(self, source: str) -> None:
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class ReadOnlyScript(RedisScript):
    """A script that only reads and stores no answer: a resent call may return a newer one, which is correct."""

    def __init__(self, name: str, body: str) -> None:
        super().__init__(name, body, returns_list=True)
        self._compile(f"local scores, facts = KEYS[1], KEYS[2]\n{body}")


class QueueKeys(NamedTuple):
    """The Redis keys of one pattern in one queue."""

    #: how every key begins
    prefix: bytes
    #: the keys that scripts work on, besides the hash of their answers
    names: tuple[bytes, ...]
    #: how many keys a script is given
    key_count: int


@lru_cache(maxsize=1024)
def _names(keys: QueueKeys, answers: int) -> tuple[Any, ...]:
    return keys.key_count, *keys.names, b"%b:calls:%d" % (keys.prefix, answers)


class ScriptCalls:
    """The calls of one pattern object, which share one estimate of the server's clock."""

    def __init__(self) -> None:
        #: the server's time minus ``time.monotonic()``, and when that was learned
        self._estimate: tuple[float, float] | None = None

    def command(self, script: RedisScript, keys: QueueKeys, values: tuple[Any, ...]) -> Command | None:
        """Return the command of one call; ``None`` without an estimate."""
        now, estimate = time.monotonic(), self._estimate
        if estimate is None or now - estimate[1] > _ESTIMATE_LIFETIME:
            return None
        latest = int(estimate[0] + now) + LATE
        # copies of a call carry the same deadline and nonce, so they share the hash and the field of its answer
        names = _names(keys, latest // _SECONDS_PER_HASH)
        return ("EVALSHA", script.sha, *names), (b"%d%b" % (latest, os.urandom(12)), *values)

    def steps(
        self,
        script: RedisScript,
        keys: QueueKeys,
        values: tuple[Any, ...],
        decode: Callable[[Any], R],
        command: Command | None = None,
        error: RedisError | None = None,
    ) -> Generator[Command, Any, R]:
        """Yield the commands of one call; the caller sends each one and passes in its reply, or throws its error.

        :param command: :param error: one that was sent before, and what was raised for it.
        :return: the decoded answer.
        :raises UnknownTask: when the id, the first of the values, was never created.
        :raises OutcomeUnknown: when no reply came, or the call was late.
        :raises NotWritable: when the server is a replica.
        """
        command = command or self.command(script, keys, values)
        while command is None:
            server_time = int((yield ("EVAL", _ASK_TIME, 1, keys.names[0]), ()))
            # the server read its clock a moment earlier, so the estimate is not ahead of it
            now = time.monotonic()
            self._estimate = server_time - now, now
            command = self.command(script, keys, values)
        try:
            try:
                if error is not None:
                    raise error
                answer = yield command
            except NoScriptError:
                (_, _, *names), arguments = command
                answer = yield ("EVAL", script.source, *names), arguments
        except RedisError as raised:
            ours = _translated(script, raised)
            if ours is None:
                raise
            raise ours from raised
        return self.value(script, keys, values, answer, decode)

    def value(
        self,
        script: RedisScript,
        keys: QueueKeys,
        values: tuple[Any, ...],
        answer: Any,
        decode: Callable[[Any], R],
    ) -> R:
        """Return the decoded answer. :raises UnknownTask: :raises OutcomeUnknown: as :meth:`steps`."""
        if answer == _UNKNOWN_ID:
            id, place = values[0].decode(), keys.prefix.decode()
            raise UnknownTask(f"{script.name}: there is no {id!r} in {place}; make it by create() first")
        if answer == _LATE_CALL:
            self._estimate = None
            raise OutcomeUnknown(
                f"{script.name}: reached Redis more than {LATE} seconds after it was called and changed nothing then; "
                "whether an earlier copy took effect is no longer known"
            )
        return decode(answer)


#: what the pools of redis-py say when all of their connections are in use: nothing was sent
_POOL_IS_FULL = ("Too many connections", "No connection available.")


def _translated(script: RedisScript, error: RedisError) -> Exception | None:
    """Our error for one of the client's or the server's, or ``None`` if it is to be raised unchanged."""
    if str(error) in _POOL_IS_FULL:
        return None
    if isinstance(error, (ConnectionError, TimeoutError)):
        return OutcomeUnknown(
            f"{script.name}: no answer came from Redis ({error}), so the call may or may not have taken effect"
        )
    if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
        return NotWritable(
            f"{script.name}: this Redis server is a replica; connect to the primary (by Sentinel or RedisCluster, if "
            "it moves)"
        )
    return None

"""One call of one script: it takes effect at most once, even when its reply is lost.

redis-py resends a command when its connection dies, without knowing whether the first copy was executed. Each call
therefore carries a nonce, and its script stores its answer under that nonce: a second copy returns the stored answer.
A copy that arrives after the answer may have expired is *late* and changes nothing. The server's clock decides, against
the deadline that the call itself carries. The client estimates that clock to compute the deadline: a wrong estimate can
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

R = TypeVar("R")

#: What a client's ``execute_command`` takes.
Command = tuple[Any, ...]

#: A copy of a call that arrives more than this many seconds after the call was made is late.
LATE = 60
#: Answers of all calls within this many seconds share one hash, which expires when the last of them would be late.
_ANSWERS_PER_HASH = 10
#: Seconds for which an estimate of the server's clock is used: two quartz clocks drift apart by less than a second.
_ESTIMATE_LIFETIME = 3600
#: What scripts return instead of an answer.
_UNKNOWN_ID, _LATE_CALL = -1, -2

_ASK_TIME = b"return redis.call('TIME')[1]"
_PROLOGUE = """\
local answered = redis.call('HGET', KEYS[1], ARGV[1])
if answered then return cmsgpack.unpack(answered) end
local time = redis.call('TIME')
local latest = tonumber(string.sub(ARGV[1], 1, -13))
if tonumber(time[1]) > latest then return -2 end

local scores, facts = KEYS[2], KEYS[3]

local function operation()
"""
_EPILOGUE = f"""\
end

local answer = operation()
redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack(answer))
if redis.call('HLEN', KEYS[1]) == 1 then
  redis.call('EXPIREAT', KEYS[1], latest + {2 * _ANSWERS_PER_HASH})
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
    local token = math.max((tonumber(known[2]) or 0) + 1, time[1] * 1000000 + time[2])
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
    :param body: Lua; it may use ``scores``, ``facts``, ``time`` and the helpers.
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
        self._compile(f"local scores, facts = KEYS[2], KEYS[3]\n{body}")


class QueueKeys(NamedTuple):
    """The Redis keys of one pattern in one queue."""

    #: how every key begins
    prefix: bytes
    #: the keys that scripts work on, besides the hash of their answers
    names: tuple[bytes, ...]
    #: how many keys a script is given, as it is sent
    key_count: bytes


class ScriptCalls:
    """The calls of one pattern object, which share one estimate of the server's clock."""

    def __init__(self) -> None:
        #: the server's time minus ``time.monotonic()``, and when that was learned
        self._estimate: tuple[float, float] | None = None

    def steps(
        self, script: RedisScript, keys: QueueKeys, values: tuple[Any, ...], decode: Callable[[Any], R]
    ) -> Generator[Command, Any, R]:
        """Yield the commands of one call; the caller sends each one and passes in its reply, or throws its error.

        :return: the decoded answer.
        :raises UnknownTask: when the id, the first of the values, was never created.
        :raises OutcomeUnknown: when no reply came, or the call was late.
        :raises NotWritable: when the server is a replica.
        """
        now, estimate = time.monotonic(), self._estimate
        while estimate is None or now - estimate[1] > _ESTIMATE_LIFETIME:
            server_time = int((yield "EVAL", _ASK_TIME, 1, keys.names[0]))
            now = time.monotonic()
            # the server read its clock a moment earlier, so the estimate is not ahead of it
            self._estimate = estimate = server_time - now, now
        latest = int(estimate[0] + now) + LATE
        # copies of a call carry the same deadline and nonce, so they share the hash and the field of its answer
        answers = b"%b:calls:%d" % (keys.prefix, latest // _ANSWERS_PER_HASH)
        nonce = b"%d%b" % (latest, os.urandom(12))
        command = "EVALSHA", script.sha, keys.key_count, answers, *keys.names, nonce, *values
        try:
            try:
                answer = yield command
            except NoScriptError:
                answer = yield "EVAL", script.source, *command[2:]
        except RedisError as error:
            ours = _translated(script, error)
            if ours is None:
                raise
            raise ours from error
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


def _translated(script: RedisScript, error: RedisError) -> Exception | None:
    """Our error for one of the client's or the server's, or ``None`` if it is to be raised unchanged."""
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

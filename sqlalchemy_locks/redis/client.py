"""One call of one script: carried out once, whatever becomes of its answer.

redis-py sends a command again when its connection dies, and can't know whether the first one arrived. So each call
has a nonce, and leaves its answer under that for a while: the second one gets the answer of the first. A copy that
arrives when that may have been forgotten comes *late*, and does nothing. Both are judged by the server's clock and by
the latest moment that the call itself names. This side estimates that clock to name it; a wrong estimate can make a
call late, never one that is carried out twice.

What is relied on: a script runs alone, and its effects reach a replica and the file together (Redis 5 and newer).

Who sends the commands is not said here: that is all in which ``redis`` and ``redis.asyncio`` differ.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, NamedTuple

from redis.client import NEVER_DECODE
from redis.exceptions import (
    ConnectionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from sqlalchemy_locks.errors import NotWritable, OutcomeUnknown, UnknownTask

#: What a client executes.
Command = tuple[Any, ...]

#: After so many seconds a call that is sent again comes late.
LATE = 60
#: The calls of so many seconds keep their answers in one hash, until the last of them would come late.
_TOGETHER = 10
#: For how long an estimate of the server's clock is good: two quartz clocks differ by less than a second then.
_ESTIMATE = 3600
_UNKNOWN, _TOO_LATE = -1, -2

_ASK = b"return redis.call('TIME')[1]"
_ENTER = """\
local answered = redis.call('HGET', KEYS[1], ARGV[1])
if answered then return cmsgpack.unpack(answered) end
local time = redis.call('TIME')
local latest = tonumber(string.sub(ARGV[1], 1, -13))
if tonumber(time[1]) > latest then return -2 end

local scores, facts = KEYS[2], KEYS[3]

local function operation()
"""
_LEAVE = f"""\
end

local answer = operation()
redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack(answer))
if redis.call('HLEN', KEYS[1]) == 1 then
  redis.call('EXPIREAT', KEYS[1], latest + {2 * _TOGETHER})
end
return answer
"""


#: For the scripts that take something, and no others: a script makes its functions anew at each call.
TAKEN = """
  -- How many retries are left, and the last token.
  local function last(id)
    return redis.call('HMGET', facts, 'retries:' .. id, 'fence:' .. id)
  end

  -- Take a retry, and give a token: greater than any before it, even if the server has lost those.
  local function acquired(id, known, owner)
    if known[1] then redis.call('HINCRBY', facts, 'retries:' .. id, -1) end
    local token = math.max((tonumber(known[2]) or 0) + 1, time[1] * 1000000 + time[2])
    redis.call('HSET', facts, 'fence:' .. id, string.format('%d', token), 'owner:' .. id, owner or '')
    return token
  end
"""
#: For captures.
FIRST = (
    TAKEN
    + """
  -- The first ids between two scores that have a retry left and that fit.
  local function first(limit, lowest, highest, fits)
    local count = limit
    while true do
      local ids = {}
      local rows = redis.call('ZRANGEBYSCORE', scores, lowest, highest, 'WITHSCORES', 'LIMIT', 0, count)
      for i = 1, #rows, 2 do
        if last(rows[i])[1] ~= '0' and (not fits or fits(rows[i], tonumber(rows[i + 1]))) then
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
    """A Lua script that is carried out once a call; its body may use what is above.

    :param helpers: functions that its body calls.
    :param listed: its answer is a list, of bytes whatever ``decode_responses`` the client has.
    """

    def __init__(self, name: str, body: str, *, helpers: str = "", listed: bool = False) -> None:
        self.name = name
        self.body = body
        self.options: dict[str, Any] = {NEVER_DECODE: True} if listed else {}
        self.source = f"{_ENTER}{helpers}{body}{_LEAVE}".encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()

    def whole(self, command: Command) -> Command:
        """The same call, where the server doesn't know the script yet."""
        return "EVAL", self.source, *command[2:]


class CachedEstimate(RedisScript):
    """A script that only reads, and leaves nothing: asked again, it may have another answer, and that is right."""

    def __init__(self, name: str, body: str) -> None:
        super().__init__(name, body, listed=True)
        self.source = f"local scores, facts = KEYS[2], KEYS[3]\n{body}".encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class Keys(NamedTuple):
    """Where a queue is."""

    #: how every key of this pattern and queue begins
    start: bytes
    #: the keys that its scripts work on, besides that of their answers
    names: tuple[bytes, ...]
    #: how many keys a script is given, as it is sent
    number: bytes


class Calls:
    """The calls of one pattern: they share what is known of the server's clock."""

    def __init__(self) -> None:
        self._estimate: tuple[float, float] | None = None

    def command(self, script: RedisScript, keys: Keys, values: tuple[Any, ...]) -> Command | None:
        """What runs a script once; ``None`` until the server's clock is known: ``question`` asks for it."""
        now, estimate = time.monotonic(), self._estimate
        if estimate is None or now - estimate[1] > _ESTIMATE:
            return None
        latest = int(estimate[0] + now) + LATE
        # every copy of this call has the same latest moment, so the same hash; and no other call has its name
        calls = b"%b:calls:%d" % (keys.start, latest // _TOGETHER)
        return "EVALSHA", script.sha, keys.number, calls, *keys.names, b"%d%b" % (latest, os.urandom(12)), *values

    def question(self, keys: Keys) -> Command:
        """What asks for the server's time."""
        return "EVAL", _ASK, 1, keys.names[0]

    def learn(self, seconds: Any) -> None:
        """Take the server's time, which has just come."""
        now = time.monotonic()
        self._estimate = int(seconds) - now, now  # as it was a moment before now, so not ahead

    def told(self, script: RedisScript, keys: Keys, values: tuple[Any, ...], answer: Any) -> Any:
        """What a script has answered.

        :raises UnknownTask: when it says that there is no such id, which is its first value then.
        :raises OutcomeUnknown: when it says that the call came late.
        """
        if answer == _UNKNOWN:
            id, place = values[0].decode(), keys.start.decode()
            raise UnknownTask(f"{script.name}: there is no {id!r} in {place}; make it by create() first")
        if answer == _TOO_LATE:
            self._estimate = None
            raise OutcomeUnknown(
                f"{script.name}: reached Redis more than {LATE} seconds after it was called, so it was not done then; "
                "whether it had been before is not known any more"
            )
        return answer


def translated(script: RedisScript, error: RedisError) -> Exception:
    """What is raised for an error of the client's, or the server's: ``error`` itself, where we have no word for it."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return OutcomeUnknown(f"{script.name}: no answer came from Redis ({error}), so it may have been done, or not")
    if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
        return NotWritable(
            f"{script.name}: this Redis server is a replica; connect to the primary (by Sentinel or RedisCluster, if "
            "it moves)"
        )
    return error

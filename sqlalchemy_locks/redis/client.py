"""One call of one script: it takes effect at most once, even when its reply is lost.

redis-py resends a command when its connection dies, without knowing whether the first copy was executed. Each call
therefore carries a nonce, and its script stores its answer under that nonce: a second copy returns the stored answer.

Answers expire. A copy that arrives afterwards is *late* and changes nothing. The server's clock decides, against the
deadline that the call itself carries. The client estimates that clock to compute the deadline: a wrong estimate can
make a call late, but never execute it twice.

A reply begins with the nonce of its call. If a signal handler raises before a connection has read a reply, the
connection gives this reply to the next command. Without the nonce, a held mutex could then seem to be acquired. A call
that reads another call's reply disconnects the client, and is sent again.

Assumed of the server: a script runs alone, and its effects reach replicas and the append-only file together (Redis 5
and newer).

:meth:`ScriptCalls.call` is the only implementation, a coroutine. With a synchronous client nothing in it waits, and
:mod:`.base` runs it to its end at once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.client import NEVER_DECODE
from redis.exceptions import ClusterError, NoScriptError, RedisClusterException

from sqlalchemy_locks.errors import NotWritable, OutcomeUnknown, UnknownTask

R = TypeVar("R")

#: A copy of a call that arrives more than this many seconds after the call was made may be late.
LATE = 60
#: Answers of all calls within this many seconds share one hash, which expires when the last of them would be late.
_SECONDS_PER_HASH = 10
#: Seconds for which an estimate of the server's clock is used: two quartz clocks drift apart by less than a second.
_ESTIMATE_LIFETIME = 3600
#: What scripts return instead of an answer.
_UNKNOWN_ID, _LATE_CALL = -1, -2

_READ_TIME = b"return {ARGV[1], redis.call('TIME')[1]}"
_PROLOGUE = """\
local calls, call = KEYS[#KEYS], ARGV[1]
local answered = redis.call('HMGET', calls, call, 'expires')
if answered[1] then return {call, cmsgpack.unpack(answered[1])} end

local time
local function now()
  time = time or redis.call('TIME')
  return time
end

-- While the hash exists, the answer to an earlier copy would be in it.
local latest
if not answered[2] then
  latest = tonumber(string.sub(call, 1, -13))
  if tonumber(now()[1]) > latest then return {call, -2} end
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
return {{call, answer}}
"""

#: Lua helpers of the scripts that acquire. Only those include them: a script defines its functions at each call.
ACQUISITION = """
  -- The retries that are left and the last fencing token; false where not stored.
  local function limits(id)
    return redis.call('HMGET', facts, 'retries:' .. id, 'fence:' .. id)
  end

  -- Spend a retry, store the owner, and return a new fencing token. The token is greater than any earlier one, even
  -- after the server has lost its data.
  local function record(id, fields, owner)
    if fields[1] then redis.call('HINCRBY', facts, 'retries:' .. id, -1) end
    local seconds, micros = unpack(now())
    local token = math.max((tonumber(fields[2]) or 0) + 1, seconds * 1000000 + micros)
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
    """

    def __init__(self, name: str, body: str, *, helpers: str = "") -> None:
        self.name = name
        self.source = f"{_PROLOGUE}{helpers}{body}{_EPILOGUE}".encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class ScriptCalls:
    """The calls of one pattern object, which share one client and one estimate of the server's clock."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.awaited = isinstance(client, (redis.asyncio.Redis, redis.asyncio.RedisCluster))
        #: the server's time minus ``time.monotonic()``, and the ``time.monotonic()`` of the estimate
        self._estimate: tuple[float, float] | None = None

    async def call(
        self, script: RedisScript, keys: list[bytes], values: tuple[Any, ...], decode: Callable[[Any], R]
    ) -> R:
        """Make one call.

        :param keys: the keys that the script works on, besides the hash of its answers.
        :return: the decoded answer.
        :raises UnknownTask: when the id, the first of the values, was never created.
        :raises OutcomeUnknown: when no reply came, or the call was late.
        :raises NotWritable: when the server is a replica.
        """
        latest = await self._server_time(keys[0]) + LATE
        # copies of a call carry the same deadline and nonce, so they share the hash and the field of its answer
        nonce = b"%d%b" % (latest, os.urandom(12))
        names = [*keys, b"%b:calls:%d" % (keys[0], latest // _SECONDS_PER_HASH)]
        arguments = (len(names), *names, nonce, *values)
        try:
            try:
                answer = await self._send(nonce, "EVALSHA", script.sha, *arguments)
            except NoScriptError:
                answer = await self._send(nonce, "EVAL", script.source, *arguments)
        except (redis.RedisError, RedisClusterException) as error:
            own_error = _translated(script, error)
            if own_error is None:
                raise
            raise own_error from error
        if answer == _UNKNOWN_ID:
            id, place = values[0].decode(), keys[0].decode()
            raise UnknownTask(f"{script.name}: there is no {id!r} in {place}; make it by create() first")
        if answer == _LATE_CALL:
            self._estimate = None
            raise OutcomeUnknown(
                f"{script.name}: reached Redis more than {LATE} seconds after it was called and changed nothing then; "
                "whether an earlier copy took effect is no longer known"
            )
        return decode(answer)

    async def _server_time(self, key: bytes) -> int:
        """Return the server's time in whole seconds; it uses the estimate unless that is too old."""
        now = time.monotonic()
        if self._estimate is None or now - self._estimate[1] > _ESTIMATE_LIFETIME:
            nonce = os.urandom(12)
            seconds = int(await self._send(nonce, "EVAL", _READ_TIME, 1, key, nonce))
            # the server read its clock a moment earlier, so the estimate is not ahead of it
            now = time.monotonic()
            self._estimate = seconds - now, now
        return int(self._estimate[0] + now)

    async def _send(self, nonce: bytes, *command: Any) -> Any:
        """Send a command and return its answer, the part of its reply that follows the nonce."""
        reply: Any = None
        for _ in range(2):
            reply = self._client.execute_command(*command, **{NEVER_DECODE: True})
            if self.awaited:
                reply = await reply
            if isinstance(reply, list) and len(reply) == 2 and reply[0] == nonce:
                return reply[1]
            await self._disconnect()
        raise OutcomeUnknown(f"Redis has answered {reply!r}, which is the reply to another command")

    async def _disconnect(self) -> None:
        """Disconnect the client, whose connections connect again at their next command."""
        client = self._client
        if self.awaited:
            pools = client.get_nodes() if isinstance(client, redis.asyncio.RedisCluster) else [client.connection_pool]
            for pool in pools:
                await pool.disconnect()
        elif hasattr(client, "disconnect_connection_pools"):  # of a cluster
            client.disconnect_connection_pools()
        else:
            client.connection_pool.disconnect()


#: the last two may follow a lost reply, when the cluster is not reachable or incomplete
_UNANSWERED = (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, ClusterError, RedisClusterException)
#: the messages of redis-py's pools when all of their connections are in use: nothing was sent
_POOL_IS_FULL = ("Too many connections", "No connection available.")


def _translated(script: RedisScript, error: Exception) -> Exception | None:
    """Return this library's error for an error of the client or the server; ``None`` if that is raised unchanged."""
    if str(error) in _POOL_IS_FULL:
        return None
    if isinstance(error, _UNANSWERED):
        why = str(error) or type(error).__name__  # the full pool of a cluster's client says nothing
        return OutcomeUnknown(
            f"{script.name}: no answer came from Redis ({why}), so the call may or may not have taken effect"
        )
    if isinstance(error, redis.ReadOnlyError) or "READONLY" in str(error):
        return NotWritable(
            f"{script.name}: this Redis server is a replica; connect to the primary (by Sentinel or RedisCluster, if "
            "it moves)"
        )
    return None

"""State transitions: tasks that move from a ready status to a captured one, and on to another when the work is done.

It is ``ZADD key XX CH <status> id``, with statuses as numbers. The number of each status name is stored beside
the tasks when the name is first used, so names may be added in any order.

Guarantee: a task is captured by one caller until its status is set, as long as the server keeps what it has
acknowledged (``docs/redis.md`` says when it doesn't).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy_locks._validation import period_seconds, valid_int, valid_name
from sqlalchemy_locks.redis.base import Call, Client, Pattern, as_id, as_ids, as_queue, as_retries, operation
from sqlalchemy_locks.redis.client import CAPTURE, RedisScript
from sqlalchemy_locks.redis.timeout import Clock, as_clock, as_instant

_STATUS = """
  local deadlines = KEYS[3]

  -- The number of a status name; a new name is given the next number.
  local function number(status)
    local stored = redis.call('HGET', facts, 'status:' .. status)
    if stored then return tonumber(stored) end
    local new = redis.call('HINCRBY', facts, 'statuses', 1) - 1
    redis.call('HSET', facts, 'status:' .. status, new)
    return new
  end

  local function deadline(id, at)
    local timeout = redis.call('HGET', facts, 'timeout:' .. id)
    if timeout then redis.call('ZADD', deadlines, at + timeout, id) end
  end
"""
_CREATE = RedisScript(
    "transition.create",
    """
  local statuses = tonumber(ARGV[4])
  for i = 5, 4 + statuses do number(ARGV[i]) end
  local initial, created = number(ARGV[5]), 0
  for i = 5 + statuses, #ARGV do
    if redis.call('ZADD', scores, 'NX', initial, ARGV[i]) == 1 then
      created = created + 1
      if ARGV[2] ~= '' then redis.call('HSET', facts, 'retries:' .. ARGV[i], ARGV[2]) end
      if ARGV[3] ~= '' then redis.call('HSET', facts, 'timeout:' .. ARGV[i], ARGV[3]) end
    end
  end
  return created
""",
    helpers=_STATUS,
)
_CAPTURE = RedisScript(
    "transition.capture",
    """
  local limit, at, captured = tonumber(ARGV[2]), tonumber(ARGV[3]) or tonumber(now()[1]), number(ARGV[4])
  local ids = {}
  for i = 5, #ARGV do
    local ready = number(ARGV[i])
    for _, id in ipairs(first(limit, ready, ready)) do ids[#ids + 1] = id end
  end
  table.sort(ids)
  local tasks = {}
  for i = 1, math.min(limit, #ids) do
    local id = ids[i]
    redis.call('ZADD', scores, 'XX', 'CH', captured, id)
    deadline(id, at)
    local claim = record(id, limits(id))
    local stored = redis.call('HMGET', facts, 'timeout:' .. id, 'retries:' .. id)
    tasks[i] = {id, claim, stored[1] or '', stored[2] or ''}
  end
  return tasks
""",
    helpers=CAPTURE + _STATUS,
)
_SET_STATUS = RedisScript(
    "transition.set_status",
    """
  local id, status, captured, claim = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local force, at = ARGV[6] == '1', tonumber(ARGV[7]) or tonumber(now()[1])
  local score = redis.call('ZSCORE', scores, id)
  if not score then return -1 end
  if not force and tonumber(score) ~= number(captured) then return 0 end
  if claim ~= '' and redis.call('HGET', facts, 'fence:' .. id) ~= claim then return 0 end
  redis.call('ZADD', scores, 'XX', 'CH', number(status), id)
  redis.call('ZREM', deadlines, id)
  if status == captured then deadline(id, at) end
  return 1
""",
    helpers=_STATUS,
)
_EXPIRE = RedisScript(
    "transition.expire",
    """
  local at = tonumber(ARGV[2]) or tonumber(now()[1])
  local ids = redis.call('ZRANGEBYSCORE', deadlines, '-inf', '(' .. at)
  for _, id in ipairs(ids) do
    redis.call('ZADD', scores, 'XX', 'CH', number('timeout'), id)
    redis.call('ZREM', deadlines, id)
  end
  return #ids
""",
    helpers=_STATUS,
)


class Task(NamedTuple):
    """A captured task; ``claim`` identifies this capture."""

    queue_id: str
    id: str
    status: str
    claim: int
    timeout: int | None
    retries_left: int | None


class StateTransition(Pattern[Client]):
    """Tasks with a status. A capture takes them from some statuses; when the work is done, they get another one.

    :param client: :param prefix: as for :class:`Mutex`.
    :param ready: the statuses that tasks are captured from; a new task has the first one.
    :param captured: the status of a captured task.
    :param clock: for tests, as for :class:`Timeout`.
    :raises TypeError: :raises ValueError: for invalid status names, or duplicates.

    >>> tasks = StateTransition(redis.Redis())
    >>> tasks.create("task_a")
    1
    >>> [task.id for task in tasks.capture(3)]
    ['task_a']
    >>> tasks.set_status("task_a", "done")
    True
    """

    kind = "task"
    _suffixes = (":facts", ":deadlines")

    def __init__(
        self,
        client: Client,
        *,
        ready: Sequence[str] = ("done", "failed"),
        captured: str = "in_progress",
        clock: Clock | None = None,
        prefix: str = "sqlalchemy_locks",
    ) -> None:
        super().__init__(client, prefix=prefix)
        if isinstance(ready, str) or not isinstance(ready, Sequence):
            raise TypeError(f"ready is a sequence of statuses, not {ready!r}")
        if not ready:
            raise ValueError("ready needs at least one status")
        self._ready = [as_status(status) for status in ready]
        self._captured = as_status(captured)
        # 0 is done, 1 is in_progress, 2 is failed
        self._statuses = [self._ready[0], self._captured, *self._ready[1:]]
        if len(set(self._statuses)) < len(self._statuses):
            raise ValueError(f"the same status twice among ready={tuple(ready)!r} and captured={captured!r}")
        self._clock = as_clock(clock)

    @operation
    def create(
        self, *ids: str, queue: str | None = None, timeout: float | timedelta | None = None, retries: int | None = None
    ) -> Call[int]:
        """Create tasks in the first status of ``ready``. Ids that exist are left unchanged.

        :param timeout: how long each may be captured before :meth:`expire` times it out, in whole seconds
            or as a ``timedelta``; ``None``: no limit.
        :param retries: how many captures each allows; ``None``: unlimited.
        :return: how many were created.

        >>> StateTransition(redis.Redis()).create("task_a", timeout=60)
        1
        """
        limits = as_retries(retries), b"" if timeout is None else period_seconds(timeout, "timeout")
        return _CREATE, queue, (*limits, len(self._statuses), *self._statuses, *as_ids(ids)), int

    @operation
    def capture(self, limit: int, *, queue: str | None = None) -> Call[list[Task]]:
        """Capture up to ``limit`` tasks that are ready and have a retry left.

        :return: the tasks, ordered by id; concurrent callers get different ones.

        >>> tasks = StateTransition(redis.Redis())
        >>> tasks.create("task_a")
        1
        >>> [task.id for task in tasks.capture(3)]
        ['task_a']
        """
        queue_id, status = as_queue(queue), self._captured.decode()

        def task(id: bytes, claim: int, timeout: bytes, retries: bytes) -> Task:
            return Task(
                queue_id,
                id.decode(),
                status,
                claim,
                int(timeout) if timeout else None,
                int(retries) if retries else None,
            )

        def decode(rows: list[list[Any]]) -> list[Task]:
            return [task(*row) for row in rows]

        return (
            _CAPTURE,
            queue,
            (valid_int(limit, "limit"), as_instant(self._clock), self._captured, *self._ready),
            decode,
        )

    @operation
    def set_status(
        self, id: str, status: str, *, queue: str | None = None, claim: int | None = None, force: bool = False
    ) -> Call[bool]:
        """Set the status of a captured task.

        :param claim: the claim of the captured task; if it has been captured again since, nothing is changed.
        :param force: set the status even if the task isn't captured; a claim is checked nevertheless.
        :return: ``False`` if it was not captured, or not with this claim.
        :raises UnknownTask: when it was never created.

        >>> tasks = StateTransition(redis.Redis())
        >>> tasks.create("task_a")
        1
        >>> [task] = tasks.capture(1)
        >>> tasks.set_status("task_a", "done", claim=task.claim)
        True
        """
        if claim is not None and (isinstance(claim, bool) or not isinstance(claim, int)):
            raise TypeError(f"claim is the number that a captured task has, not {claim!r}")
        number = b"" if claim is None else int(claim)
        values = as_id(id), as_status(status), self._captured, number, int(bool(force)), as_instant(self._clock)
        return _SET_STATUS, queue, values, bool

    @operation
    def expire(self, *, queue: str | None = None) -> Call[int]:
        """Set the status ``timeout`` on the captured tasks whose ``timeout`` has passed.

        They can be captured again if ``ready`` contains that status. Workers should pass ``claim`` to
        :meth:`set_status`, so that a worker whose task has timed out changes nothing.

        :return: how many tasks timed out.

        >>> tasks = StateTransition(redis.Redis())
        >>> tasks.create("task_a")
        1
        >>> tasks.expire()
        0
        """
        return _EXPIRE, queue, (as_instant(self._clock),), int


def as_status(status: Any) -> bytes:
    return valid_name(status, "a status").encode()

"""What is held, and what waits, part by part: what the command line and the page both show.

It runs operations and nothing else, each by itself: a part that isn't installed, or isn't told on this engine, says so
and keeps no other from being shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from sqlalchemy_locks import lock, semaphore
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.errors import NotInstalled, Unsupported
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import QUEUE
from sqlalchemy_locks.health import Finding, examine
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.runtime.pools import connected
from sqlalchemy_locks.semaphore.queries import holding_ages, oldest_holders
from sqlalchemy_locks.sql.clock import Now, utc
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

Rows = list[dict[str, Any]]
#: what an app may have in tables of its own
Own = Queue[Any] | Mutex | Timeout

#: so many mutexes and timeouts are told of
MOST = 1000
#: how long nothing must have been heard of a job's worker to have it told as stalled, in seconds
STALLED = 300.0
#: how far completed jobs are looked back for, in seconds, and how many of them are counted
LATELY, COUNTED = 3600.0, 50_000
#: so many changes of capacity
CHANGES = 20


@dataclass(frozen=True)
class Part:
    """One part of it: its rows, or why there are none to be told."""

    rows: Rows | None
    error: NotInstalled | Unsupported | None = None


def look_at(locks: Locks, read: Callable[[Locks], Rows]) -> Part:
    """Read one part.

    :raises DBAPIError: what the driver raises for another reason than that something isn't installed.
    """
    try:
        return Part(read(locks))
    except (NotInstalled, Unsupported) as error:
        return Part(None, error)


def _dicts(rows: Any) -> Rows:
    return [dict(row._mapping) for row in rows]


def semaphores(locks: Locks) -> Rows:
    """Every semaphore, as ``semaphore.usage`` has it."""
    return _dicts(locks.run(semaphore.usage()))


def holders(each: int, name: str | None = None) -> Callable[[Locks], Rows]:
    """Who has held permits longest, so many of each semaphore."""
    return lambda locks: _dicts(locks.run(oldest_holders(each, name)))


def ages(locks: Locks) -> Rows:
    """How many permits are held by age: one row."""
    return _dicts(locks.run(holding_ages()))


def queues(locks: Locks, queue: Queue[Any] | None = None) -> Rows:
    """Every queue, as ``Queue.stats`` has it, of the shipped table or of one's own."""
    rows: list[Any] = locks.run((queue or Queue()).stats())
    return [{**dict(row._mapping), "oldest": utc(row.oldest)} for row in rows]


def stalled(locks: Locks, queue: Queue[Any] | None = None) -> Rows:
    """How many running jobs nothing was heard of for ``STALLED`` seconds, queue by queue."""
    return _dicts(locks.run(activity.stalled(STALLED, (queue or Queue())._jobs)))


def completed(locks: Locks) -> Rows:
    """How many jobs were completed in each of the last minutes, queue by queue."""
    return _dicts(locks.run(activity.completed(LATELY, COUNTED)))


def mutexes(locks: Locks, mutex: Mutex | None = None) -> Rows:
    """What is taken."""
    return _dicts(locks.run((mutex or Mutex()).held(MOST)))


def timeouts(locks: Locks, timeout: Timeout | None = None) -> Rows:
    """All timeouts."""
    return _dicts(locks.run((timeout or Timeout()).listed(MOST)))


def maintenance(locks: Locks) -> Rows:
    """The timeouts that guard the tasks of ``Locks.maintain``: when each is due again."""
    return _dicts(locks.run(Timeout().listed(MOST, queue=QUEUE)))


def keys(locks: Locks) -> Rows:
    """Who holds keys, and who waits for them."""
    return [asdict(holder) for holder in locks.run(lock.holders())]


def changes(locks: Locks) -> Rows:
    """The last changes of capacity, newest first."""
    return _dicts(locks.run(semaphore.history(limit=CHANGES)))


def instant(locks: Locks) -> datetime:
    """Now, by the server; whoever asks it first finds out whether there is one."""
    with connected(locks._engine) as connection:
        now = utc(connection.scalar(select(Now())))
    assert now is not None
    return now


def facts(locks: Locks) -> list[Finding]:
    """What ``health.examine`` finds, where these locks are."""
    options = locks._engine.get_execution_options()
    schema = options.get("schema_translate_map", {}).get(DEFAULT_SCHEMA, DEFAULT_SCHEMA)
    with connected(locks._engine) as connection:
        return examine(connection, schema=schema, prefix=options.get("locks_prefix", DEFAULT_PREFIX))


def place(locks: Locks) -> str:
    """Which database, for people: no password, and none of the URL's options, where others hide."""
    return locks._engine.url.set(query={}).render_as_string(hide_password=True)

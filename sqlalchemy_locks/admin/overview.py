"""What is held and what waits, part by part: the data of the command line and of the dashboard.

It only runs operations, each by itself: a part that isn't installed, or isn't available on this engine, reports that
and doesn't affect the others.
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
from sqlalchemy_locks.dialects.connections import connected
from sqlalchemy_locks.errors import NotInstalled, Unsupported
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import QUEUE
from sqlalchemy_locks.health import Finding, examine
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.semaphore.queries import holding_ages, oldest_holders
from sqlalchemy_locks.sql.clock import Now, utc
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

Rows = list[dict[str, Any]]
#: what an app may keep in tables of its own
Own = Queue[Any] | Mutex | Timeout

#: the maximum number of mutexes, and of timeouts
MOST = 1000
#: a running job is stalled when its worker has sent no heartbeat for this many seconds
STALLED = 300.0
#: completed jobs are counted over this many seconds, and up to this number
LATELY, COUNTED = 3600.0, 50_000
#: the maximum number of changes of capacity
CHANGES = 20


@dataclass(frozen=True)
class Part:
    """One part: its rows, or the error that says why it has none."""

    rows: Rows | None
    error: NotInstalled | Unsupported | None = None


def look_at(locks: Locks, read: Callable[[Locks], Rows]) -> Part:
    """Read one part.

    :raises DBAPIError: for any other error of the driver.
    """
    try:
        return Part(read(locks))
    except (NotInstalled, Unsupported) as error:
        return Part(None, error)


def _dicts(rows: Any) -> Rows:
    return [dict(row._mapping) for row in rows]


def semaphores(locks: Locks) -> Rows:
    """Return every semaphore, as ``semaphore.usage`` does."""
    return _dicts(locks.run(semaphore.usage()))


def holders(each: int, name: str | None = None) -> Callable[[Locks], Rows]:
    """Return a query for the oldest holders: up to ``each`` of every semaphore."""
    return lambda locks: _dicts(locks.run(oldest_holders(each, name)))


def ages(locks: Locks) -> Rows:
    """Return how many permits are held, by age: one row."""
    return _dicts(locks.run(holding_ages()))


def queues(locks: Locks, queue: Queue[Any] | None = None) -> Rows:
    """Return every queue, as ``Queue.stats`` does, of the shipped table or of the app's."""
    rows: list[Any] = locks.run((queue or Queue()).stats())
    return [{**dict(row._mapping), "oldest": utc(row.oldest)} for row in rows]


def stalled(locks: Locks, queue: Queue[Any] | None = None) -> Rows:
    """Return how many running jobs had no heartbeat for ``STALLED`` seconds, queue by queue."""
    return _dicts(locks.run(activity.stalled(STALLED, (queue or Queue())._jobs)))


def completed(locks: Locks) -> Rows:
    """Return how many jobs were completed in each of the last minutes, queue by queue."""
    return _dicts(locks.run(activity.completed(LATELY, COUNTED)))


def mutexes(locks: Locks, mutex: Mutex | None = None) -> Rows:
    """Return the mutexes that are held."""
    return _dicts(locks.run((mutex or Mutex()).held(MOST)))


def timeouts(locks: Locks, timeout: Timeout | None = None) -> Rows:
    """Return all timeouts."""
    return _dicts(locks.run((timeout or Timeout()).listed(MOST)))


def maintenance(locks: Locks) -> Rows:
    """Return the timeouts that guard the tasks of ``Locks.maintain``: when each is due again."""
    return _dicts(locks.run(Timeout().listed(MOST, queue=QUEUE)))


def keys(locks: Locks) -> Rows:
    """Return the holders of keys, and the waiters."""
    return [asdict(holder) for holder in locks.run(lock.holders())]


def changes(locks: Locks) -> Rows:
    """Return the last changes of capacity, newest first."""
    return _dicts(locks.run(semaphore.history(limit=CHANGES)))


def instant(locks: Locks) -> datetime:
    """Return the server's time; called first, it also shows whether the server can be reached."""
    with connected(locks._engine) as connection:
        now = utc(connection.scalar(select(Now())))
    assert now is not None
    return now


def facts(locks: Locks) -> list[Finding]:
    """Return the findings of ``health.examine`` for the database of these locks."""
    options = locks._engine.get_execution_options()
    schema = options.get("schema_translate_map", {}).get(DEFAULT_SCHEMA, DEFAULT_SCHEMA)
    with connected(locks._engine) as connection:
        return examine(connection, schema=schema, prefix=options.get("locks_prefix", DEFAULT_PREFIX))


def place(locks: Locks) -> str:
    """Return the database's URL for display: without the password, and without options, which may hold secrets."""
    return locks._engine.url.set(query={}).render_as_string(hide_password=True)

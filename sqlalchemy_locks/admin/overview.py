"""The holders and waiters of every pattern, part by part: the data of the command line and of the dashboard.

It only runs operations, each by itself: if a part isn't installed, or isn't available on this engine, its error doesn't
affect the others. Rows are limited, and counts are exact up to a limit, so that the cost of a part stays
bounded in a large database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select

from sqlalchemy_locks import lock, semaphore
from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.conditional.listing import count_listed
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import Operation, translated_schema
from sqlalchemy_locks.core.transaction import connected
from sqlalchemy_locks.errors import NotInstalled, Unsupported
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import QUEUE
from sqlalchemy_locks.health import Finding, examine
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.queue.liveness import STALLED_AFTER
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.semaphore import monitoring
from sqlalchemy_locks.sql.clock import Now, utc
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

Rows = list[dict[str, Any]]
#: the patterns whose rows may be in a table of the app's own
OwnTable = Queue[Any] | Mutex | Timeout

#: completed jobs, holders, mutexes and timeouts are counted up to this number
COUNT_LIMIT = 2_000
#: waiting jobs of a queue are counted up to this number
HEAD_LIMIT = 400
#: completed jobs are counted over this many seconds
COMPLETED_WITHIN = 3600.0
#: the maximum number of changes of capacity
CHANGES = 20
#: the maximum number of semaphores with waiters whose holders are read
QUEUED = 50


@dataclass(frozen=True)
class Part:
    """One part: its first rows and its counts, or the error that says why it has none."""

    rows: Rows | None
    counts: Mapping[str, int] = field(default_factory=dict)
    #: the names of counts that reached the limit, so that there may be more
    at_least: Collection[str] = ()
    error: NotInstalled | Unsupported | None = None


def read_part(locks: Locks, read: Callable[[Locks], Part]) -> Part:
    """Read one part.

    :raises DBAPIError: for any other error of the driver.
    """
    try:
        return read(locks)
    except (NotInstalled, Unsupported) as error:
        return Part(None, error=error)


def _dicts(rows: Any) -> Rows:
    return [dict(row._mapping) for row in rows]


def semaphores(locks: Locks, limit: int) -> Part:
    """Return the fullest semaphores, and the leases that are held longest (``on_demand``).

    Expired permits count as ``expired``, not as ``used``. The counts exclude only the expired permits of these rows.

    :param limit: how many semaphores, and how many leases.
    """
    counts: dict[str, int] = dict.fromkeys(("semaphores", "full", "leases", "leases_held", "permits"), 0)
    rows: Rows = []
    for row in _dicts(locks.run(monitoring.fullest(limit))):
        row.update(used=int(row["used"]), on_demand=bool(row["on_demand"]))
        total, full = row.pop("total"), row.pop("full")
        if row["id"] is not None:
            rows.append(row)
            continue
        counts["permits"] += row["used"]
        if row["on_demand"]:
            counts |= {"leases": total, "leases_held": int(row["holders"])}
        else:
            counts |= {"semaphores": total, "full": int(full)}
    # only for these rows: for all semaphores, every held request would have to be read
    ids = [row["id"] for row in rows if row["holders"]]
    expired = {id: int(permits) for id, permits in locks.run(monitoring.expired_permits(ids)) if permits} if ids else {}
    for row in rows:
        row["expired"] = expired.get(row["id"], 0)
        live = row["used"] - row["expired"]
        counts["permits"] -= row["expired"]
        if row["expired"] and row["on_demand"]:
            counts["leases_held"] -= 1
        elif row["expired"]:
            counts["full"] -= live < row["capacity"] <= row["used"]
        row["used"] = live
    return Part([row for row in rows if row["used"] or not row["on_demand"]], counts)


def one_semaphore(locks: Locks, name: str) -> Part:
    """Return the semaphore of this name, if there is one, as :func:`semaphores` does."""
    rows = _dicts(locks.run(monitoring.named([name])))
    return Part([{**row, "on_demand": False} for row in rows], {"semaphores": len(rows)})


def holders(each: int, semaphores: list[int]) -> Callable[[Locks], Part]:
    """Return a query for the oldest holders: up to ``each`` of each of these semaphores, given by their ids."""
    return lambda locks: Part(_dicts(locks.run(monitoring.oldest_holders(each, semaphores))))


def ages(locks: Locks) -> Part:
    """Return how many requests are held, by age: one row."""
    rows = _dicts(locks.run(monitoring.holder_ages(COUNT_LIMIT)))
    total = sum(int(count) for name, count in rows[0].items() if name != "expired")
    return Part(rows, {"holders": total}, ["holders"] if total == COUNT_LIMIT else ())


def queues(locks: Locks) -> Rows:
    """Return every queue with exact counts, as ``Queue.stats`` does."""
    return [{**row, "oldest": utc(row["oldest"])} for row in _dicts(locks.run(Queue().stats()))]


def queue_counts(locks: Locks, queue: Queue[Any] | None = None) -> Part:
    """Return the queues with their jobs by state, those with late jobs first.

    Waiting jobs are counted only in the queues whose next job has waited longest, as many as ``HEADS`` has names. The
    jobs that are captured next are counted. Each row's ``at_least`` names the counts that may be greater.
    """
    jobs = None if queue is None else queue._jobs
    limited: Any = locks.run(activity.limited_stats(COUNT_LIMIT, STALLED_AFTER, jobs))
    rows: dict[str, dict[str, Any]] = {row.queue_id: {**row._mapping, "at_least": []} for row in limited}
    waiting: Any = locks.run(activity.next_jobs(COUNT_LIMIT, jobs))
    names = [job.queue_id for job in waiting]
    heads: Any = locks.run(activity.heads(names[: len(activity.HEADS)], HEAD_LIMIT, jobs))
    for name, counted in [*zip(names, waiting, strict=True), *zip(names, heads, strict=False)]:
        row = rows.setdefault(name, {**counted._mapping, "paused": False, "at_least": []})
        row |= {"waiting": counted.waiting, "scheduled": counted.scheduled, "oldest": utc(counted.oldest)}
    for number, name in enumerate(names):
        if number >= len(activity.HEADS) or rows[name]["waiting"] + rows[name]["scheduled"] == HEAD_LIMIT:
            rows[name]["at_least"] += ["waiting", "scheduled"]
    counts = {state: sum(row[state] for row in rows.values()) for state in activity.STATES}
    states = [state for state in ("running", "dead") if counts[state] >= COUNT_LIMIT]
    for row in rows.values():
        row["at_least"] += states + ["stalled"] * ("running" in states)
    ordered = sorted(rows.values(), key=lambda row: (row["oldest"] is None, row["oldest"] or 0, row["queue_id"]))
    return Part(ordered, {"queues": len(rows), **counts}, {state for row in ordered for state in row["at_least"]})


def dead(locks: Locks, limit: int, queue: Queue[Any] | None = None) -> Part:
    """Return the jobs that died last."""
    return Part(_dicts(locks.run(activity.dead(limit, jobs=queue._jobs if queue else None))))


def error_line(job: Mapping[str, Any]) -> str | None:
    """Return the last line of a dead job's error, which in a traceback is the error itself."""
    return next(reversed((job["error"] or "").strip().splitlines()), None)


def workers(locks: Locks, queue: Queue[Any] | None = None) -> Part:
    """Return the workers, silent ones first; none for an app's own table of jobs without a table of workers."""
    if queue is not None and queue._jobs.workers is None:
        return Part([], {"workers": 0, "silent": 0})
    rows = _dicts(locks.run(activity.workers(COUNT_LIMIT, COUNT_LIMIT, queue._jobs if queue else None)))
    at_least = ["running"] if sum(row["running"] for row in rows) >= COUNT_LIMIT else []
    for row in rows:
        row["at_least"], row["silent"] = at_least, max(0, row["silent"])
        row["alive"] = row["silent"] < STALLED_AFTER
    silent = sum(not row["alive"] for row in rows)
    return Part(rows, {"workers": len(rows), "silent": silent}, ["workers"] if len(rows) == COUNT_LIMIT else ())


def completed(locks: Locks) -> Part:
    """Return how many jobs were completed in each of the last minutes, queue by queue."""
    return Part(_dicts(locks.run(activity.completed(COMPLETED_WITHIN, COUNT_LIMIT))))


def mutexes(locks: Locks, limit: int, mutex: Mutex | None = None) -> Part:
    """Return the mutexes that are held, the longest held first."""
    return _listed(locks, (mutex or Mutex()).held(limit), "mutexes")


def timeouts(locks: Locks, limit: int, timeout: Timeout | None = None) -> Part:
    """Return the timeouts, each acquired at most once per period, by name."""
    return _listed(locks, (timeout or Timeout()).listed(limit), "periods")


def _listed(locks: Locks, listing: Operation[Any], what: str) -> Part:
    rows = _dicts(locks.run(listing))
    count = locks.run(count_listed(listing, COUNT_LIMIT + 1)) or 0
    return Part(rows, {what: min(count, COUNT_LIMIT)}, [what] if count > COUNT_LIMIT else ())


def maintenance(locks: Locks) -> Part:
    """Return the timeouts that guard the tasks of ``Locks.maintain``: when each is due again."""
    return Part(_dicts(locks.run(Timeout().listed(queue=QUEUE))))


def keys(locks: Locks) -> Part:
    """Return the holders of locks with their waiters; before them (by ``kind``) the queues of waiters for permits.

    The row of such a queue has a sentence, ``says``, about its waiters and holders. The first waiter holds its key.
    """
    rows = [asdict(holder) for holder in locks.run(lock.holders())]
    for row in rows:
        row["waiters"] = len(row["waiting"]) + (row["kind"] != "lock")
    rows.sort(key=lambda row: (row["kind"] == "lock", -row["waiters"]))
    queues = [row for row in rows if row["kind"] != "lock"]
    waiters = sum(row["waiters"] for row in queues)
    counts = {"locks": len(rows) - len(queues), "waiter_queues": len(queues), "permit_waiters": waiters}
    counts["lock_waiters"] = sum(row["waiters"] for row in rows) - waiters
    if queues:
        now, names = instant(locks), [row["name"] for row in queues[:QUEUED]]
        holders = {row.name: row for row in locks.run(monitoring.named(names))}
        for row in queues:
            row["says"] = (
                f"{row['waiters']:,} waiter{'' if row['waiters'] == 1 else 's'} of {row['kind']} {row['name']}"
            )
            permits = holders.get(row["name"])
            if permits is not None and permits.holders:
                others = f" and {permits.holders - 1:,} more" if permits.holders > 1 else ""
                age = format_duration((now - permits.oldest_since).total_seconds())
                row["says"] += f" (held by {permits.oldest_owner or permits.oldest_holder}{others}, {age})"
    return Part(rows, counts)


def changes(locks: Locks) -> Part:
    """Return the last changes of capacity, newest first."""
    return Part(_dicts(locks.run(semaphore.history(limit=CHANGES))))


def instant(locks: Locks) -> datetime:
    """Return the server's time; called first, it also shows whether the server can be reached."""
    with connected(locks._engine) as connection:
        now = utc(connection.scalar(select(Now())))
    assert now is not None
    return now


def findings(locks: Locks) -> list[Finding]:
    """Return the findings of ``health.examine`` for the database of these locks."""
    options = locks._engine.get_execution_options()
    schema = translated_schema(options, DEFAULT_SCHEMA)
    with connected(locks._engine) as connection:
        return examine(connection, schema=schema, prefix=options.get("locks_prefix", DEFAULT_PREFIX))


def display_url(locks: Locks) -> str:
    """Return the database's URL for display: without the password, and without options, which may hold secrets."""
    return locks._engine.url.set(query={}).render_as_string(hide_password=True)

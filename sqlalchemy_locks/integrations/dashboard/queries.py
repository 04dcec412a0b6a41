"""The data of the page, read part by part and limited in size.

A part that can't be read shows why, and doesn't affect the others.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.admin.overview import OwnTable, Part
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import QUEUE, TASKS
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.semaphore.monitoring import AGES
from sqlalchemy_locks.sql.clock import utc

#: how many of each are shown; the page says how many more there are
SEMAPHORES, HOLDERS, HOLDERS_OF_ONE, QUEUES, KEYS, WAITERS, MUTEXES, TIMEOUTS = 50, 10, 500, 50, 100, 10, 100, 50
LEASES, DEAD, WORKERS = 50, 20, 50
#: how many semaphores, and how many of all holders, are shown unfolded
UNFOLDED, _OPEN = 6, 12
_LEVELS = ("over", "full", "busy", "")
_MINUTES = int(overview.COMPLETED_WITHIN // 60)
_FAILURES = (LockError, SQLAlchemyError, OSError)
_log = logging.getLogger("sqlalchemy_locks")


@dataclass(frozen=True)
class Section:
    """A part of the page: its rows and counts, how many more rows there are, or why it can't be read."""

    rows: Any = ()
    more: int = 0
    error: str | None = None
    #: why a table of it can't be read, by the name of the app's own table, ``None`` for the shipped one
    errors: tuple[tuple[str | None, str], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    #: the names of counts that may be greater
    at_least: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Snapshot:
    """Everything that the page shows at one time."""

    now: datetime
    engine: str
    #: the URL, without its password
    place: str
    #: the same in short: host and database
    short_place: str
    semaphores: Section
    leases: Section
    ages: Section
    dead: Section
    queues: Section
    workers: Section
    lately: Section
    #: who waits for permits
    waiters: Section
    locks: Section
    mutexes: Section
    periods: Section
    maintenance: Section
    changes: Section
    #: the semaphore whose holders are shown, if one was chosen
    of: str | None = None


def read_all(locks: Locks, of: str | None = None, own: Mapping[str, OwnTable] | None = None) -> Snapshot:
    """Read everything.

    :param own: tables of the app's own, by name.
    :param of: show only this semaphore, with many more of its holders.
    :raises SQLAlchemyError, OSError: when the database can't be reached.
    """
    now, place, tables = overview.instant(locks), overview.display_url(locks), own or {}
    completed = _section(locks, overview.completed)
    semaphores, leases = _semaphores(locks, of, now)
    timeouts = _limited(overview.timeouts, TIMEOUTS + len(TASKS))
    waiters, holders = _keys(_section(locks, overview.keys), now)
    dead = _with_ages(_with_own(locks, _limited(overview.dead, DEAD), tables, Queue), "failed_at", now)
    for row in dead.rows:
        row["line"] = overview.error_line(row)
    workers = _with_own(locks, overview.workers, tables, Queue)
    workers_shown = sorted(workers.rows, key=lambda row: -row["silent"])
    mutexes = _with_ages(_with_own(locks, _limited(overview.mutexes, MUTEXES), tables, Mutex), "acquired_at", now)
    return Snapshot(
        now=now,
        engine=locks.engine_name,
        place=place,
        short_place=place.partition("://")[2].replace(":***@", "@").removeprefix("/") or place,
        semaphores=semaphores,
        leases=leases,
        ages=_section(locks, overview.ages, _ages),
        dead=_cut(sorted(dead.rows, key=lambda row: row["age"]), DEAD, dead, len(dead.rows)),
        queues=_queues(locks, now, completed, tables),
        workers=_cut(workers_shown, WORKERS, workers, workers.counts.get("workers", 0)),
        lately=completed if completed.error is not None else _lately(completed),
        waiters=waiters,
        locks=holders,
        mutexes=_cut(mutexes.rows, MUTEXES, mutexes, mutexes.counts.get("mutexes", 0)),
        periods=_periods(_with_own(locks, timeouts, tables, Timeout)),
        maintenance=_section(locks, overview.maintenance, _maintenance),
        changes=_section(locks, overview.changes, lambda section: _with_ages(section, "changed_at", now)),
        of=of,
    )


def facts(locks: Locks) -> Section:
    """Return findings about the engine, its settings and the installation; slower than :func:`read_all`."""
    order = {"problem": 0, "warning": 1, "ok": 2}
    try:
        return Section(rows=sorted(overview.findings(locks), key=lambda finding: order[finding.level]))
    except _FAILURES as error:
        return Section(error=_sentence(error))


def cause(error: BaseException) -> str:
    """Return an error's message in one line; of a database error, the driver's."""
    if isinstance(error, LockError):
        return str(error)
    origin = error.orig if isinstance(error, DBAPIError) else error
    message = str(origin).strip().partition("\n")[0]
    return f"{type(origin).__name__}: {message[:300]}"


def _sentence(error: Exception) -> str:
    """Return why a part can't be shown, as a sentence."""
    if isinstance(error, LockError):
        return str(error)
    _log.warning("page: a part could not be read", exc_info=error)
    return f"this could not be read: {cause(error)}"


def _section(
    locks: Locks, read: Callable[[Locks], Part], shape: Callable[[Section], Section] = lambda section: section
) -> Section:
    """Read a part. :param shape: converts its rows for the page, if they could be read."""
    try:
        part = overview.read_part(locks, read)
    except _FAILURES as error:
        return Section(error=_sentence(error))
    if part.rows is None:
        return Section(error=str(part.error))
    return shape(Section(rows=part.rows, counts=part.counts, at_least=frozenset(part.at_least)))


def _limited(read: Callable[..., Part], limit: int) -> Callable[..., Part]:
    return lambda locks, *table: read(locks, limit, *table)


def _with_own(locks: Locks, read: Callable[..., Part], own: Mapping[str, OwnTable], kind: type[Any]) -> Section:
    """Read the shipped table and the app's own of a kind; each row's ``own`` is the name of its table."""
    sections: dict[str | None, Section] = {None: _section(locks, read)}
    for name, table in own.items():
        if isinstance(table, kind):
            sections[name] = _section(locks, lambda locks, table=table: read(locks, table))  # type: ignore[misc]
    if len(sections) == 1 and sections[None].error is not None:
        return sections[None]
    counts: Counter[str] = Counter()
    for section in sections.values():
        counts.update(section.counts)
    return Section(
        rows=[{**row, "own": name} for name, section in sections.items() for row in section.rows],
        errors=tuple((name, section.error) for name, section in sections.items() if section.error is not None),
        counts=counts,
        at_least=frozenset[str]().union(*(section.at_least for section in sections.values())),
    )


def _cut(rows: list[Any], limit: int, section: Section, total: int) -> Section:
    """Return a section of the first rows. :param total: how many there are."""
    return replace(section, rows=rows[:limit], more=max(0, total - len(rows[:limit])))


def _semaphores(locks: Locks, of: str | None, now: datetime) -> tuple[Section, Section]:
    try:
        section = _section(
            locks,
            lambda locks: overview.semaphores(locks, SEMAPHORES) if of is None else overview.one_semaphore(locks, of),
        )
    except ValueError:  # the URL has an invalid name
        return Section(), Section()
    if section.error is not None:
        return section, section
    leases = [{**row, "age": _age(utc(row["oldest_since"]), now)} for row in section.rows if row["on_demand"]]
    rows = [_with_level(row) for row in section.rows if not row["on_demand"]]
    # the full first, then the nearly full; within each by name, so that the order rarely changes between refreshes
    rows.sort(key=lambda row: (_LEVELS.index(row["level"]), row["level"] == "" and not row["used"], str(row["name"])))
    _add_holders(locks, rows, of)
    return (
        _cut(rows, SEMAPHORES, section, section.counts["semaphores"]),
        _cut(leases, LEASES, section, section.counts.get("leases_held", 0)),
    )


def _with_level(row: Mapping[str, Any]) -> dict[str, Any]:
    used, capacity, expired = int(row["used"]), int(row["capacity"]), int(row["expired"])
    share = 1.0 if used >= capacity else used / capacity
    level = "over" if used > capacity else "full" if share >= 1 else "busy" if share >= 0.8 else ""
    return {**row, "used": used, "capacity": capacity, "expired": expired, "share": share, "level": level}


def _add_holders(locks: Locks, rows: list[dict[str, Any]], of: str | None) -> None:
    """Add the oldest holders to each row."""
    used = [row["id"] for row in rows if row["holders"]]
    section = Section()
    if used:
        section = _section(locks, overview.holders(HOLDERS if of is None else HOLDERS_OF_ONE, used))
    holders: dict[int, list[Any]] = {}
    for holder in section.rows:
        holders.setdefault(holder["semaphore_id"], []).append(holder)
    shown = 0
    for row in rows:
        row["people"] = holders.get(row["id"], [])
        row["more"] = max(0, int(row["holders"]) - len(row["people"])) if section.error is None else 0
        row["error"] = section.error
        shown += len(row["people"])
        row["open"] = of is not None or shown <= _OPEN


def _ages(section: Section) -> Section:
    (row,) = section.rows
    labels = [f"under {_label(AGES[0])}", *(f"{_label(a)} – {_label(b)}" for a, b in itertools.pairwise(AGES))]
    labels.append(f"{_label(AGES[-1])} and more")
    counts = [int(row[f"age_{number}"]) for number in range(len(AGES) + 1)]
    most = max(counts)
    bars = [(label, count, count / most if most else 0.0) for label, count in zip(labels, counts, strict=True)]
    return replace(section, rows={"bars": bars, "total": sum(counts), "expired": int(row["expired"])})


def _label(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"


def _queues(locks: Locks, now: datetime, completed: Section, own: Mapping[str, OwnTable]) -> Section:
    section = _with_own(locks, overview.queue_counts, own, Queue)
    if section.error is not None:
        return section
    jobs: Counter[str] = Counter()
    for row in completed.rows:
        jobs[row["queue_id"]] += int(row["completed"])
    queues = {(row["own"], row["queue_id"]): dict(row) for row in section.rows}
    none: dict[str, Any] = dict.fromkeys(activity.STATES, 0)
    for name in jobs:
        queues.setdefault((None, name), {"queue_id": name, "own": None, "paused": False, "at_least": (), **none})
    for row in queues.values():
        row["late"] = _age(row.get("oldest"), now)
        # an app's own table may have no index to count them by
        row["completed"] = jobs[row["queue_id"]] if row["own"] is None else None
        table = None if row["own"] is None else own[row["own"]]
        row["pausable"] = not isinstance(table, Queue) or table._jobs.paused is not None
    # of too many queues, those whose jobs are most overdue are shown; in an order that rarely changes
    rows = sorted(queues.values(), key=lambda row: (row["late"] is None, -(row["late"] or 0), row["queue_id"]))
    rows = rows[:QUEUES]
    rows.sort(key=lambda row: (not (row["dead"] or row["stalled"]), row["own"] or "", row["queue_id"]))
    only_completed = len(queues) - len(section.rows)
    return _cut(rows, QUEUES, section, section.counts.get("queues", 0) + only_completed)


def _lately(section: Section) -> Section:
    minutes = [0] * _MINUTES
    for row in section.rows:
        minutes[min(max(int(row["minute"]), 0), _MINUTES - 1)] += int(row["completed"])
    total = sum(minutes)
    # counted from the newest job backwards: the limit leaves out the oldest
    since = next((ago for ago in reversed(range(_MINUTES)) if minutes[ago]), 0) + 1
    chart = {"minutes": minutes[::-1], "total": total, "peak": max(minutes), "since": since}
    return Section(rows={**chart, "capped": total >= overview.COUNT_LIMIT})


def _keys(section: Section, now: datetime) -> tuple[Section, Section]:
    """Return who waits for permits, and the locks that are held."""
    queues = [row for row in section.rows if row["kind"] != "lock"]
    rows = []
    for holder in section.rows[len(queues) :]:
        waiters = holder["waiting"]
        row = {**holder, "age": _age(holder["since"], now)}
        row["more"] = max(0, len(waiters) - WAITERS)
        row["waiting"] = [{**waiter, "age": _age(waiter["since"], now)} for waiter in waiters[:WAITERS]]
        rows.append(row)
    return _cut(queues, KEYS, section, len(queues)), _cut(rows, KEYS, section, len(rows))


def _periods(section: Section) -> Section:
    rows = [row for row in section.rows if row["own"] or row["queue"] != QUEUE]
    return _cut(rows, TIMEOUTS, section, section.counts.get("periods", 0) - (len(section.rows) - len(rows)))


def _maintenance(section: Section) -> Section:
    due = {row["id"]: int(row["free_in"]) for row in section.rows}
    rows = []
    for task in TASKS:
        seconds = due.get(task.name)
        # maintenance checks every minute: if a task is overdue by ten minutes, no process runs it
        late = seconds is not None and seconds < -600
        rows.append({"name": task.name, "every": task.every, "due": seconds, "late": late})
    return replace(section, rows=rows)


def _with_ages(section: Section, column: str, now: datetime) -> Section:
    return replace(section, rows=[{**row, "age": _age(row[column], now)} for row in section.rows])


def _age(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else max(0.0, (now - instant).total_seconds())

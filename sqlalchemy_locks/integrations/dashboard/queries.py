"""What the page shows, read part by part and limited in size.

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
from sqlalchemy_locks.health import Finding
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.semaphore.queries import AGES
from sqlalchemy_locks.sql.clock import utc

#: how many of each are shown; the page says how many more there are
SEMAPHORES, HOLDERS, HOLDERS_OF_ONE, QUEUES, KEYS, WAITERS, MUTEXES, TIMEOUTS = 50, 10, 500, 50, 100, 10, 100, 50
LEASES = 50
#: how many semaphores, and how many of all holders, are shown unfolded
UNFOLDED, _OPEN = 6, 12
_LEVELS = ("over", "full", "busy", "")
_MINUTES = int(overview.COMPLETED_WITHIN // 60)
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
    queues: Section
    lately: Section
    keys: Section
    mutexes: Section
    timeouts: Section
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
    now = overview.instant(locks)
    place = overview.display_url(locks)
    lately, others = _section(locks, overview.completed), own or {}
    semaphores, leases = _semaphores(locks, of, now)
    return Snapshot(
        now=now,
        engine=locks.engine_name,
        place=place,
        short_place=place.partition("://")[2].replace(":***@", "@").removeprefix("/") or place,
        semaphores=semaphores,
        leases=leases,
        ages=_ages(_section(locks, overview.ages)),
        queues=_queues(locks, now, lately, others),
        lately=_lately(lately),
        keys=_keys(_section(locks, overview.keys), now),
        mutexes=_mutexes(_with_own(locks, _limited(overview.mutexes, MUTEXES), others, Mutex), now),
        timeouts=_timeouts(_with_own(locks, _limited(overview.timeouts, TIMEOUTS + len(TASKS)), others, Timeout)),
        maintenance=_maintenance(_section(locks, overview.maintenance)),
        changes=_changes(_section(locks, overview.changes), now),
        of=of,
    )


def _limited(read: Callable[..., Part], limit: int) -> Callable[..., Part]:
    return lambda locks, *table: read(locks, limit, *table)


def facts(locks: Locks) -> Section:
    """Return findings about the engine, its settings and the installation; slower than :func:`read_all`."""
    found: list[Finding] = []
    error = _attempt(lambda: found.extend(overview.findings(locks)))
    order = {"problem": 0, "warning": 1, "ok": 2}
    return Section(rows=sorted(found, key=lambda each: order[each.level]), error=error)


def sentence(error: BaseException) -> str:
    """Return why a part can't be shown, as a sentence."""
    return cause(error) if isinstance(error, LockError) else f"this could not be read: {cause(error)}"


def cause(error: BaseException) -> str:
    """Return an error's message in one line; of a database error, the driver's."""
    if isinstance(error, LockError):
        return str(error)
    origin = error.orig if isinstance(error, DBAPIError) else error
    message = str(origin).strip().partition("\n")[0]
    return f"{type(origin).__name__}: {message[:300]}"


def _attempt(read: Callable[[], Any]) -> str | None:
    """Return why a read failed, or ``None``."""
    try:
        read()
    except (LockError, SQLAlchemyError, OSError) as error:
        if not isinstance(error, LockError):
            _log.warning("page: a part could not be read", exc_info=error)
        return sentence(error)
    return None


def _section(locks: Locks, read: Callable[[Locks], Part]) -> Section:
    found: list[Part] = []
    error = _attempt(lambda: found.append(overview.read_part(locks, read)))
    if error is not None:
        return Section(error=error)
    (part,) = found
    if part.rows is None:
        return Section(error=str(part.error))
    return Section(rows=part.rows, counts=part.counts, at_least=frozenset(part.at_least))


def _with_own(locks: Locks, read: Callable[..., Part], own: Mapping[str, OwnTable], kind: type[Any]) -> Section:
    """Read the shipped table and the app's own of a kind; each row's ``own`` is the name of its table."""

    def reader(one: Any) -> Callable[[Locks], Part]:
        return lambda locks: read(locks, one)

    sections: dict[str | None, Section] = {None: _section(locks, read)}
    sections |= {name: _section(locks, reader(one)) for name, one in own.items() if isinstance(one, kind)}
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


def _cut(rows: list[Any], most: int, section: Section, total: int | None = None) -> Section:
    """Return a section of the first rows. :param total: how many there are, where ``rows`` aren't all."""
    shown = rows[:most]
    return replace(section, rows=shown, more=max(0, (len(rows) if total is None else total) - len(shown)))


def _semaphores(locks: Locks, of: str | None, now: datetime) -> tuple[Section, Section]:
    if of is None:
        section = _section(locks, lambda locks: overview.semaphores(locks, SEMAPHORES))
    else:
        try:
            section = _section(locks, lambda locks: overview.one_semaphore(locks, of))
        except ValueError:  # what the URL says is no name
            return Section(), Section()
    if section.error is not None:
        return section, section
    leases = [row for row in section.rows if row["on_demand"]]
    shown = [dict(row) for row in section.rows if not row["on_demand"]]
    for row in shown:
        row["used"], row["capacity"] = int(row["used"]), int(row["capacity"])
        row["share"] = 1.0 if row["used"] >= row["capacity"] else row["used"] / row["capacity"]
        row["level"] = "over" if row["used"] > row["capacity"] else "full" if row["share"] >= 1 else ""
        row["level"] = row["level"] or ("busy" if row["share"] >= 0.8 else "")
    # the full first, then the nearly full; within each by name, so that the order rarely changes between refreshes
    shown.sort(key=lambda row: (_LEVELS.index(row["level"]), row["level"] == "" and not row["used"], str(row["name"])))
    held = Section()
    if chosen := [row["id"] for row in shown if row["used"]]:
        held = _section(locks, overview.holders(HOLDERS if of is None else HOLDERS_OF_ONE, chosen))
    by_id: dict[int, list[Any]] = {}
    for holder in held.rows:
        by_id.setdefault(holder["semaphore_id"], []).append(holder)
    seen = 0
    for row in shown:
        row["people"] = by_id.get(row["id"], [])
        row["more"] = max(0, int(row["holders"]) - len(row["people"])) if held.error is None else 0
        row["error"] = held.error
        seen += len(row["people"])
        row["open"] = of is not None or seen <= _OPEN
    counts = section.counts
    return (
        _cut(shown, SEMAPHORES, section, counts["semaphores"]),
        _cut(
            [{**row, "age": _age(utc(row["oldest_since"]), now)} for row in leases],
            LEASES,
            section,
            counts.get("leases_held", 0),
        ),
    )


def _ages(section: Section) -> Section:
    if section.error is not None:
        return section
    (row,) = section.rows
    labels = [f"under {_label(AGES[0])}", *(f"{_label(a)} – {_label(b)}" for a, b in itertools.pairwise(AGES))]
    labels.append(f"{_label(AGES[-1])} and more")
    counts = [int(row[f"age_{number}"]) for number in range(len(AGES) + 1)]
    most = max(counts)
    bars = [(label, count, count / most if most else 0.0) for label, count in zip(labels, counts, strict=True)]
    return replace(section, rows={"bars": bars, "total": sum(counts), "expired": int(row["expired"])})


def _label(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"


def _queues(locks: Locks, now: datetime, lately: Section, own: Mapping[str, OwnTable]) -> Section:
    section = _with_own(locks, overview.queue_counts, own, Queue)
    if section.error is not None:
        return section
    done: Counter[str] = Counter()
    for row in lately.rows:
        done[row["queue_id"]] += int(row["completed"])
    known = {(row["own"], row["queue_id"]): dict(row) for row in section.rows}
    counted = len(known)
    none: dict[str, Any] = dict.fromkeys(("waiting", "scheduled", "running", "stalled", "dead"), 0)
    for name in done:
        known.setdefault((None, name), {"queue_id": name, "own": None, "at_least": (), "paused": False, **none})
    for row in known.values():
        row["late"] = _age(row.get("oldest"), now)
        # an app's own table may have no index to count them by
        row["done"] = done[row["queue_id"]] if row["own"] is None else None
        row["well"] = int(row["running"]) - int(row["stalled"])
        table = None if row["own"] is None else own[row["own"]]
        row["pausable"] = not isinstance(table, Queue) or table._jobs.paused is not None
    # where there are too many, those whose jobs are the latest are shown; in an order that rarely changes
    latest = sorted(known.values(), key=lambda row: (row["late"] is None, -(row["late"] or 0), row["queue_id"]))[
        :QUEUES
    ]
    latest.sort(key=lambda row: (not (row["dead"] or row["stalled"]), row["own"] or "", row["queue_id"]))
    return _cut(latest, QUEUES, section, section.counts.get("queues", 0) + len(known) - counted)


def _lately(section: Section) -> Section:
    if section.error is not None:
        return section
    minutes = [0] * _MINUTES
    for row in section.rows:
        minutes[min(max(int(row["minute"]), 0), _MINUTES - 1)] += int(row["completed"])
    total = sum(minutes)
    # counted from the newest job backwards: the limit leaves out the oldest
    since = next((ago for ago in reversed(range(_MINUTES)) if minutes[ago]), 0) + 1
    return Section(
        rows={
            "minutes": minutes[::-1],
            "total": total,
            "peak": max(minutes),
            "capped": total >= overview.COUNT_LIMIT,
            "since": since,
        }
    )


def _keys(section: Section, now: datetime) -> Section:
    rows = []
    for held in section.rows:
        one = {**held, "age": _age(held["since"], now), "more": max(0, len(held["waiting"]) - WAITERS)}
        one["waiting"] = [{**each, "age": _age(each["since"], now)} for each in held["waiting"][:WAITERS]]
        one["waiters"] = len(held["waiting"])
        rows.append(one)
    # holders that others wait for come first
    rows.sort(key=lambda row: -row["waiters"])
    return _cut(rows, KEYS, section)


def _mutexes(section: Section, now: datetime) -> Section:
    if section.error is not None:
        return section
    rows = [{**row, "age": _age(row["acquired_at"], now)} for row in section.rows]
    return _cut(rows, MUTEXES, section, section.counts["mutexes"])


def _timeouts(section: Section) -> Section:
    if section.error is not None:
        return section
    rows = [row for row in section.rows if row["own"] or row["queue"] != QUEUE]
    return _cut(rows, TIMEOUTS, section, section.counts["timeouts"] - (len(section.rows) - len(rows)))


def _maintenance(section: Section) -> Section:
    if section.error is not None:
        return section
    known = {row["id"]: row for row in section.rows}
    rows = []
    for task in TASKS:
        row = known.get(task.name)
        due = None if row is None else int(row["free_in"])
        # maintenance checks every minute: a task overdue by ten isn't run by any process
        rows.append({"name": task.name, "every": task.every, "due": due, "late": due is not None and due < -600})
    return Section(rows=rows)


def _changes(section: Section, now: datetime) -> Section:
    if section.error is not None:
        return section
    return Section(rows=[{**row, "age": _age(row["changed_at"], now)} for row in section.rows])


def _age(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else max(0.0, (now - instant).total_seconds())

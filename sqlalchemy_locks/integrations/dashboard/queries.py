"""What the page shows, read part by part and cut to what a page can hold.

A part that can't be read says why, in a sentence, and keeps no other from being shown.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.admin.overview import Own, Rows
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import QUEUE, TASKS
from sqlalchemy_locks.health import Finding
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.semaphore.queries import AGES

#: so many of each are shown, and how many there are besides is told
SEMAPHORES, HOLDERS, HOLDERS_OF_ONE, QUEUES, KEYS, WAITERS, MUTEXES, TIMEOUTS = 50, 10, 500, 50, 100, 10, 100, 50
#: so many holders are seen at first, the others by a click
_OPEN = 24
_MINUTES = int(overview.LATELY // 60)
_log = logging.getLogger("sqlalchemy_locks")


@dataclass(frozen=True)
class Section:
    """A part of the page: what there is, how many besides, or why there is nothing to be told."""

    rows: Any = ()
    more: int = 0
    says: str | None = None
    #: why one of its tables is not told of: which of the app's own, or ``None`` for the shipped one
    untold: tuple[tuple[str | None, str], ...] = ()


@dataclass(frozen=True)
class Look:
    """One look at everything."""

    now: datetime
    engine: str
    #: the URL, without its password
    place: str
    #: the same, as people call it
    called: str
    semaphores: Section
    ages: Section
    queues: Section
    lately: Section
    keys: Section
    mutexes: Section
    timeouts: Section
    maintenance: Section
    changes: Section
    #: of which semaphore the holders are shown, where one was chosen
    of: str | None = None


def look(locks: Locks, of: str | None = None, own: Mapping[str, Own] | None = None) -> Look:
    """Read it all.

    :param own: what the app has in tables of its own, by what it is called.
    :param of: only this semaphore, with many more of its holders.
    :raises SQLAlchemyError, OSError: when there is no connection to be had.
    """
    now = overview.instant(locks)
    place = overview.place(locks)
    lately, others = _section(locks, overview.completed), own or {}
    return Look(
        now=now,
        engine=locks.engine_name,
        place=place,
        called=place.partition("://")[2].replace(":***@", "@").removeprefix("/") or place,
        semaphores=_semaphores(locks, of),
        ages=_ages(_section(locks, overview.ages)),
        queues=_queues(locks, now, lately, others),
        lately=_lately(lately),
        keys=_keys(_section(locks, overview.keys), now),
        mutexes=_mutexes(_every(locks, overview.mutexes, others, Mutex), now),
        timeouts=_timeouts(_every(locks, overview.timeouts, others, Timeout)),
        maintenance=_maintenance(_section(locks, overview.maintenance)),
        changes=_changes(_section(locks, overview.changes), now),
        of=of,
    )


def facts(locks: Locks) -> Section:
    """The engine, its settings, and what is installed; it takes longer than a look."""
    found: list[Finding] = []
    says = _attempt(lambda: found.extend(overview.facts(locks)))
    order = {"problem": 0, "warning": 1, "ok": 2}
    return Section(rows=sorted(found, key=lambda each: order[each.level]), says=says)


def sentence(error: BaseException) -> str:
    """Why a part is not shown, for people."""
    return cause(error) if isinstance(error, LockError) else f"this could not be read: {cause(error)}"


def cause(error: BaseException) -> str:
    """What went wrong, in a line: of an error of a driver's, what the driver says."""
    if isinstance(error, LockError):
        return str(error)
    origin = error.orig if isinstance(error, DBAPIError) else error
    said = str(origin).strip().partition("\n")[0]
    return f"{type(origin).__name__}: {said[:300]}"


def _attempt(read: Callable[[], Any]) -> str | None:
    """Why it failed, where it did."""
    try:
        read()
    except (LockError, SQLAlchemyError, OSError) as error:
        if not isinstance(error, LockError):
            _log.warning("page: a part could not be read", exc_info=error)
        return sentence(error)
    return None


def _section(locks: Locks, read: Callable[[Locks], Rows]) -> Section:
    found: list[overview.Part] = []
    says = _attempt(lambda: found.append(overview.look_at(locks, read)))
    if says is not None:
        return Section(says=says)
    (part,) = found
    return Section(says=str(part.error)) if part.rows is None else Section(rows=part.rows)


def _every(locks: Locks, read: Callable[..., Rows], own: Mapping[str, Own], kind: type[Any]) -> Section:
    """The rows of the shipped table, and of the app's own of a kind, each with ``own``: whose it is."""

    def reader(one: Any) -> Callable[[Locks], Rows]:
        return lambda locks: read(locks, one)

    sections: dict[str | None, Section] = {None: _section(locks, read)}
    sections |= {name: _section(locks, reader(one)) for name, one in own.items() if isinstance(one, kind)}
    if len(sections) == 1 and sections[None].says is not None:
        return sections[None]
    return Section(
        rows=[{**row, "own": name} for name, section in sections.items() for row in section.rows],
        untold=tuple((name, section.says) for name, section in sections.items() if section.says is not None),
    )


def _cut(rows: list[Any], most: int, section: Section) -> Section:
    return Section(rows=rows[:most], more=max(0, len(rows) - most), untold=section.untold)


def _semaphores(locks: Locks, of: str | None) -> Section:
    section = _section(locks, overview.semaphores)
    if section.says is not None:
        return section
    rows = [dict(row) for row in section.rows if of in (None, row["name"])]
    for row in rows:
        row["used"], row["capacity"] = int(row["used"]), int(row["capacity"])
        row["share"] = 1.0 if row["used"] >= row["capacity"] else row["used"] / row["capacity"]
    # where there are too many, those that are fullest, but in an order that stays
    fullest = sorted(rows, key=lambda row: -row["share"])[:SEMAPHORES]
    shown = sorted(fullest, key=lambda row: str(row["name"]))
    if not shown:
        # nobody is asked for holders by what may be no name at all
        return Section(rows=[])
    each = HOLDERS if of is None else HOLDERS_OF_ONE
    held = _section(locks, overview.holders(each, of))
    by_name: dict[str, list[Any]] = {}
    for holder in held.rows:
        by_name.setdefault(holder["name"], []).append(holder)
    seen = 0
    for row in shown:
        row["people"] = by_name.get(row["name"], [])
        row["more"] = max(0, int(row["holders"]) - len(row["people"])) if held.says is None else 0
        row["says"] = held.says
        seen += len(row["people"])
        row["open"] = of is not None or seen <= _OPEN
    return Section(rows=shown, more=len(rows) - len(shown))


def _ages(section: Section) -> Section:
    if section.says is not None:
        return section
    (row,) = section.rows
    labels = [f"under {_spelt(AGES[0])}", *(f"{_spelt(a)} – {_spelt(b)}" for a, b in itertools.pairwise(AGES))]
    labels.append(f"{_spelt(AGES[-1])} and more")
    counts = [int(row[f"age_{number}"]) for number in range(len(AGES) + 1)]
    most = max(counts)
    bars = [(label, count, count / most if most else 0.0) for label, count in zip(labels, counts, strict=True)]
    return Section(rows={"bars": bars, "total": sum(counts), "expired": int(row["expired"])})


def _spelt(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"


def _queues(locks: Locks, now: datetime, lately: Section, own: Mapping[str, Own]) -> Section:
    section = _every(locks, overview.queues, own, Queue)
    if section.says is not None:
        return section
    still = _every(locks, overview.stalled, own, Queue)
    stalled = {(row["own"], row["queue_id"]): int(row["stalled"]) for row in still.rows}
    done: dict[str, int] = {}
    for row in lately.rows:
        done[row["queue_id"]] = done.get(row["queue_id"], 0) + int(row["completed"])
    known = {(row["own"], row["queue_id"]): dict(row) for row in section.rows}
    none = dict.fromkeys(("waiting", "scheduled", "running", "dead"), 0)
    for name in done:
        known.setdefault((None, name), {"queue_id": name, "own": None, **none})
    for key, row in known.items():
        row["late"] = _age(row.get("oldest"), now)
        row["stalled"] = stalled.get(key, 0)
        # which index of a table of one's own would serve to count them nobody knows
        row["done"] = done.get(row["queue_id"], 0) if row["own"] is None else None
        row["well"] = int(row["running"]) - row["stalled"]
    return _cut([known[key] for key in sorted(known, key=lambda key: (key[0] or "", key[1]))], QUEUES, section)


def _lately(section: Section) -> Section:
    if section.says is not None:
        return section
    minutes = [0] * _MINUTES
    for row in section.rows:
        minutes[min(max(int(row["minute"]), 0), _MINUTES - 1)] += int(row["completed"])
    total = sum(minutes)
    # counted from the newest back: what is left out is what is oldest
    since = next((ago for ago in reversed(range(_MINUTES)) if minutes[ago]), 0) + 1
    return Section(
        rows={
            "minutes": minutes[::-1],
            "total": total,
            "peak": max(minutes),
            "capped": total >= overview.COUNTED,
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
    # whom others wait for comes first
    rows.sort(key=lambda row: -row["waiters"])
    cut = _cut(rows, KEYS, section)
    return Section(rows=cut.rows, more=cut.more, says=section.says)


def _mutexes(section: Section, now: datetime) -> Section:
    if section.says is not None:
        return section
    return _cut([{**row, "age": _age(row["acquired_at"], now)} for row in section.rows], MUTEXES, section)


def _timeouts(section: Section) -> Section:
    if section.says is not None:
        return section
    return _cut([row for row in section.rows if row["own"] or row["queue"] != QUEUE], TIMEOUTS, section)


def _maintenance(section: Section) -> Section:
    if section.says is not None:
        return section
    known = {row["id"]: row for row in section.rows}
    rows = []
    for task in TASKS:
        row = known.get(task.name)
        due = None if row is None else int(row["free_in"])
        # whoever maintains asks every minute, so that a turn that nobody took for ten is nobody's
        rows.append({"name": task.name, "every": task.every, "due": due, "late": due is not None and due < -600})
    return Section(rows=rows)


def _changes(section: Section, now: datetime) -> Section:
    if section.says is not None:
        return section
    return Section(rows=[{**row, "age": _age(row["changed_at"], now)} for row in section.rows])


def _age(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else max(0.0, (now - instant).total_seconds())

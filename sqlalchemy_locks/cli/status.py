"""``status``: everything that is held, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Group
from rich.text import Text

from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, database_command
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.queue import queue_table, worker_table
from sqlalchemy_locks.cli.render import Screen, number, plain, second, table
from sqlalchemy_locks.cli.semaphore import semaphore_table
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.facade.locks import Locks


@click.command(short_help="Show what is held, and what waits.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Maximum number of rows of a part."
)
@database_command()
def status(screen: Screen, database: Database, limit: int) -> int | None:
    """Show what is held, and what waits: semaphores, leases, queues, workers, mutexes, periods, locks.

    Each part shows its first rows, and the number of further rows. Full semaphores, queues with late jobs, silent
    workers, and the mutexes and locks that are held longest come first. Mutexes and periods are counted up to 2,000:
    more are 2,000+. The exit code is 1 if nothing is installed.

    \b
      sqlalchemy-locks status
      sqlalchemy-locks status --json | jq '.semaphores[] | select(.used == .capacity) | .name'
    """
    document = _read(database, limit)
    screen.show(document, _tables(document))
    installed = any(document[part] is not None for part in ("semaphores", "queues", "mutexes", "periods"))
    return None if installed else EXIT_NEGATIVE


def _read(database: Database, limit: int) -> dict[str, Any]:
    """Return everything as one document; a part is ``None`` where it isn't installed, or this engine can't list it."""
    locks = Locks(database.engine)
    reads: dict[str, Callable[[Locks], overview.Part]] = {
        "semaphores": lambda locks: overview.semaphores(locks, limit),
        "queues": overview.queue_counts,
        "workers": overview.workers,
        "mutexes": lambda locks: overview.mutexes(locks, limit),
        "periods": lambda locks: overview.timeouts(locks, limit),
        "locks": overview.keys,
    }
    parts = {name: overview.read_part(locks, read) for name, read in reads.items()}
    document: dict[str, Any] = {"database": database.display, "locks_error": None, "counts": {}, "at_least": []}
    for part_name, part in parts.items():
        document[part_name] = part.rows
        document["counts"] |= part.counts
        document["at_least"] += sorted(part.at_least)
        if isinstance(part.error, Unsupported):
            document["locks_error"] = str(part.error)
    keys, document["waiters"] = document["locks"], None
    if keys is not None:
        document["locks"] = [row for row in keys if row["kind"] == "lock"]
        waiting = [row for row in keys if row["kind"] != "lock"]
        document["waiters"] = [{name: row.get(name) for name in ("kind", "name", "waiters", "says")} for row in waiting]
    for part_name in ("queues", "workers", "locks", "waiters"):
        document[part_name] = document[part_name] and document[part_name][:limit]
    every = document["semaphores"]
    for kind, on_demand in (("semaphores", False), ("leases", True)):
        document[kind] = None if every is None else [_without_id(row) for row in every if row["on_demand"] is on_demand]
    return document


def _without_id(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("id", "on_demand", "oldest", "place")}


def _tables(document: dict[str, Any]) -> Group:
    makers: dict[str, Callable[[Any], Any]] = {
        "semaphores": semaphore_table,
        "leases": _lease_table,
        "waiters": lambda rows: Text("\n").join(plain(row["says"]) for row in rows),
        "queues": queue_table,
        "workers": worker_table,
        "mutexes": _mutex_table,
        "periods": _period_table,
        "locks": _lock_table,
    }
    parts: list[Any] = [plain(document["database"])]
    empty = []
    for part, make in makers.items():
        rows = document[part]
        if not rows and (rows is not None or part == "waiters"):
            empty += [] if rows is None else [part]
            continue
        parts.append(Text(f"\n{part.capitalize()}", style="bold"))
        if rows is None:
            why = document["locks_error"] if part == "locks" else None
            parts.append(plain(why or "not installed; `sqlalchemy-locks check` shows what is", "yellow"))
            continue
        parts.append(make(rows))
        total = document["counts"][{"leases": "leases_held", "waiters": "waiter_queues"}.get(part, part)]
        if total > len(rows):
            more = f"{total - len(rows):,}{'+' if part in document['at_least'] else ''} more"
            parts.append(plain(f"... and {more}"))
    if empty:
        parts.append(Text(f"\nNone: {', '.join(empty)}", "dim"))
    return Group(*parts)


def _lease_table(rows: list[dict[str, Any]]) -> Any:
    grid = table("Lease", "Owner", "Since (UTC)", whole=("Since (UTC)",))
    for row in rows:
        grid.add_row(
            plain(row["name"]), plain(row["oldest_owner"] or row["oldest_holder"]), second(row["oldest_since"])
        )
    return grid


def _mutex_table(rows: list[dict[str, Any]]) -> Any:
    grid = table("Mutex", "Queue", "Owner", "Since (UTC)", whole=("Since (UTC)",))
    for row in rows:
        cells = [plain(row["queue"], "dim"), plain(row["owner"]), second(row["acquired_at"])]
        grid.add_row(plain(row["id"]), *cells)
    return grid


def _period_table(rows: list[dict[str, Any]]) -> Any:
    right = ("Stored period", "Free in", "Retries left")
    grid = table("Once per period", "Queue", *right, right=right)
    for row in rows:
        free = int(row["free_in"]) < 0
        remaining = plain("now", "green") if free else plain(format_duration(int(row["free_in"])))
        cells = [plain(format_duration(row["every"])), remaining, number(row["retries"])]
        grid.add_row(plain(row["id"]), plain(row["queue"], "dim"), *cells)
    return grid


def _lock_table(rows: list[dict[str, Any]]) -> Any:
    grid = table("Key", "Mode", "Session", "Client", "Since (UTC)", "Waiting", whole=("Key", "Mode", "Session"))
    for row in rows:
        waiting = [
            plain(f"{waiter['session']} {waiter['mode']}, {_client(waiter)}", "yellow") for waiter in row["waiting"]
        ]
        cells = [plain(row["mode"]), plain(row["session"]), plain(_client(row)), second(row["since"])]
        grid.add_row(plain(row["key"]), *cells, Text("\n").join(waiting) if waiting else plain(None, "dim"))
    return grid


def _client(session: dict[str, Any]) -> str:
    address = session["user"] if session["host"] is None else f"{session['user'] or ''}@{session['host']}"
    return ", ".join(part for part in (session["owner"], address, session.get("state")) if part) or "?"

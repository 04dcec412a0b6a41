"""``status`` and ``top``: everything that is held, and what waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.cli.base import (
    EXIT_NEGATIVE,
    INTERRUPT_INTERVAL,
    database_command,
    duration_option,
    interruptible,
    program,
)
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.queue import queue_table
from sqlalchemy_locks.cli.render import Screen, name, note, number, second, sentence, table, title
from sqlalchemy_locks.cli.semaphore import semaphore_table
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.facade.locks import Locks

#: how many rows of a part are shown, unless ``--limit`` says otherwise
_LIMIT = 20
_limit_option = click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=_LIMIT,
    show_default=True,
    help="Maximum number of rows of a part.",
)


@click.command(short_help="Show what is held, and what waits.")
@_limit_option
@database_command()
def status(screen: Screen, database: Database, limit: int) -> int | None:
    """Show what is held, and what waits: semaphores, leases, queues, mutexes, timeouts, keys.

    Of each the first are shown, and how many more there are: full semaphores, queues whose jobs are late, and what is
    held longest come first. Jobs, mutexes and timeouts are counted up to 2,000: more are 2,000+. It exits with 1 where
    nothing is installed.

    \b
      sqlalchemy-locks status
      sqlalchemy-locks status --json | jq '.semaphores[] | select(.used == .capacity) | .name'
    """
    return _show_once(screen, database, limit)


@click.command(short_help="Watch what is held, and what waits.")
@duration_option("--interval", default="2s", show_default=True, help="Seconds between refreshes.")
@click.option("--once", is_flag=True, help="Show it once and exit, for scripts.")
@_limit_option
@database_command()
def top(screen: Screen, database: Database, interval: float, once: bool, limit: int) -> int | None:
    """Watch what `status` shows; Ctrl-C ends it.

    With --json it prints one document per line. A refresh is a handful of short SELECTs, which lock nothing.
    """
    if interval < 0.1:
        raise click.UsageError("--interval must be at least 0.1 s.")
    if once:
        return _show_once(screen, database, limit)
    with interruptible() as interrupted, _refreshing(screen, interval) as show:
        while not interrupted():
            show(_read(database, limit))
            waited = 0.0
            while waited < interval and not interrupted():
                database.sleep(INTERRUPT_INTERVAL)
                waited += INTERRUPT_INTERVAL
    return None


def _show_once(screen: Screen, database: Database, limit: int) -> int | None:
    document = _read(database, limit)
    screen.show(document, _tables(document, screen.console))
    installed = any(document[part] is not None for part in ("semaphores", "queues", "mutexes", "timeouts"))
    return None if installed else EXIT_NEGATIVE


@contextlib.contextmanager
def _refreshing(screen: Screen, interval: float) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows a document in the place of the one before."""
    console = screen.console
    if screen.as_json:
        yield screen.line
    elif not console.is_terminal:
        yield lambda document: screen.show(document, _tables(document, console))
    else:
        footer = note(f"\nEvery {format_duration(interval)}; Ctrl-C ends it")
        with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            yield lambda document: live.update(Group(_tables(document, console), footer), refresh=True)


def _read(database: Database, limit: int) -> dict[str, Any]:
    """Return everything as one document; a part is ``None`` where it isn't installed, or this engine can't list it."""
    locks = Locks(database.engine)
    reads: dict[str, Callable[[Locks], overview.Part]] = {
        "semaphores": lambda locks: overview.semaphores(locks, limit),
        "queues": overview.queue_counts,
        "mutexes": lambda locks: overview.mutexes(locks, limit),
        "timeouts": lambda locks: overview.timeouts(locks, limit),
        "keys": overview.keys,
    }
    parts = {name: overview.read_part(locks, read) for name, read in reads.items()}
    document: dict[str, Any] = {"database": database.location.display, "keys_error": None, "counts": {}, "at_least": []}
    for part_name, part in parts.items():
        document[part_name] = part.rows
        document["counts"] |= part.counts
        document["at_least"] += sorted(part.at_least)
        if isinstance(part.error, Unsupported):
            document["keys_error"] = str(part.error)
    for part_name in ("queues", "keys"):
        document[part_name] = document[part_name] and document[part_name][:limit]
    every = document["semaphores"]
    for kind, on_demand in (("semaphores", False), ("leases", True)):
        document[kind] = None if every is None else [_without_id(row) for row in every if row["on_demand"] is on_demand]
    return document


def _without_id(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("id", "on_demand", "oldest", "place")}


def _tables(document: dict[str, Any], console: Console) -> Group:
    makers: dict[str, Callable[[Any], Any]] = {
        "semaphores": lambda rows: semaphore_table(rows, console),
        "leases": _lease_table,
        "queues": queue_table,
        "mutexes": _mutex_table,
        "timeouts": _timeout_table,
        "keys": _key_table,
    }
    parts: list[Any] = [note(document["database"])]
    for part, make in makers.items():
        rows = document[part]
        parts.append(title(part.capitalize()))
        if rows is None:
            why = document["keys_error"] if part == "keys" else None
            parts.append(sentence(why or f"not installed; `{program()} check` shows what is", "yellow"))
            continue
        parts.append(make(rows))
        total = document["counts"]["leases_held" if part == "leases" else part]
        if total > len(rows):
            more = f"{total - len(rows):,}{'+' if part in document['at_least'] else ''} more"
            parts.append(note(f"... and {more}"))
    return Group(*parts)


def _lease_table(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None")
    shown = table("Lease", "Owner", "Since (UTC)", whole=("Since (UTC)",))
    for row in rows:
        shown.add_row(name(row["name"]), name(row["oldest_owner"] or row["oldest_holder"]), second(row["oldest_since"]))
    return shown


def _mutex_table(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None")
    shown = table("Mutex", "Queue", "Owner", "Since (UTC)", whole=("Since (UTC)",))
    for row in rows:
        cells = [name(row["queue"], "dim"), name(row["owner"]), second(row["acquired_at"])]
        shown.add_row(name(row["id"]), *cells)
    return shown


def _timeout_table(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None")
    shown = table("Timeout", "Queue", "Every", "Free in", "Retries left", right=("Every", "Free in", "Retries left"))
    for row in rows:
        free = int(row["free_in"]) < 0
        remaining = name("now", "green") if free else name(format_duration(int(row["free_in"])))
        cells = [name(format_duration(row["every"])), remaining, number(row["retries"])]
        shown.add_row(name(row["id"]), name(row["queue"], "dim"), *cells)
    return shown


def _key_table(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None")
    shown = table("Key", "Mode", "Session", "Client", "Since (UTC)", "Waiting", whole=("Key", "Mode", "Session"))
    for row in rows:
        waiting = [
            name(f"{waiter['session']} {waiter['mode']}, {_client(waiter)}", "yellow") for waiter in row["waiting"]
        ]
        cells = [name(row["mode"]), name(row["session"]), name(_client(row)), second(row["since"])]
        shown.add_row(name(row["key"]), *cells, Text("\n").join(waiting) if waiting else name(None, "dim"))
    return shown


def _client(session: dict[str, Any]) -> str:
    address = session["user"] if session["host"] is None else f"{session['user'] or ''}@{session['host']}"
    return ", ".join(part for part in (session["owner"], address, session.get("state")) if part) or "?"

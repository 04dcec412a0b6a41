"""``status`` and ``top``: everything that is held, and who waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.admin import overview as parts_of
from sqlalchemy_locks.admin.overview import look_at
from sqlalchemy_locks.cli.base import lasting, on_database, program, told_to_end
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.queue import queues
from sqlalchemy_locks.cli.render import Screen, name, note, number, second, sentence, table, title
from sqlalchemy_locks.cli.semaphore import semaphores
from sqlalchemy_locks.errors import NotInstalled
from sqlalchemy_locks.facade.locks import Locks

#: so long Ctrl-C may go unseen, in seconds
_GLANCE = 0.1
_PARTS = {
    "semaphores": parts_of.semaphores,
    "queues": parts_of.queues,
    "mutexes": parts_of.mutexes,
    "timeouts": parts_of.timeouts,
    "keys": parts_of.keys,
}


@click.command(short_help="Show what is held, and what waits.")
@on_database()
def status(screen: Screen, database: Database) -> None:
    """Show what is held, and what waits: semaphores, queues, mutexes, timeouts, keys.

    \b
      sqlalchemy-locks status
      sqlalchemy-locks status --json | jq '.semaphores[] | select(.used == .capacity) | .name'
    """
    document = overview(database)
    screen.show(document, shown(document, screen.console))


@click.command(short_help="Watch what is held, and what waits.")
@lasting("--interval", default="2s", show_default=True, help="How often to look.")
@click.option("--once", is_flag=True, help="Look once, and end: for scripts.")
@on_database()
def top(screen: Screen, database: Database, interval: float, once: bool) -> None:
    """Watch what `status` shows; Ctrl-C ends it.

    With --json it is one document a line. Looking costs the server a handful of short SELECTs, which lock nothing.
    """
    if interval < 0.1:
        raise click.UsageError("--interval must be at least 0.1 s.")
    if once:
        document = overview(database)
        screen.show(document, shown(document, screen.console))
        return
    with told_to_end() as over:
        _watch(screen, database, interval, over)


def _watch(screen: Screen, database: Database, interval: float, over: Callable[[], bool]) -> None:
    with _shower(screen, interval) as show:
        while not over():
            show(overview(database))
            waited = 0.0
            while waited < interval and not over():
                database.sleep(_GLANCE)
                waited += _GLANCE


@contextlib.contextmanager
def _shower(screen: Screen, interval: float) -> Iterator[Callable[[dict[str, Any]], None]]:
    console = screen.console
    if screen.as_json:
        yield screen.line
    elif not console.is_terminal:
        yield lambda document: screen.show(document, shown(document, console))
    else:
        foot = note(f"\nEvery {format_duration(interval)}; Ctrl-C ends it")
        with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            yield lambda document: live.update(Group(shown(document, console), foot), refresh=True)


def overview(database: Database) -> dict[str, Any]:
    """All of it, as one document; ``None`` for what isn't installed, and for keys that aren't told on this engine.

    :raises NotInstalled: when nothing is.
    """
    locks = Locks(database.engine)
    parts = {called: look_at(locks, read) for called, read in _PARTS.items()}
    document: dict[str, Any] = {"database": database.target.shown, "untold": None}
    missing: list[NotInstalled] = []
    for called, part in parts.items():
        document[called] = part.rows
        if isinstance(part.error, NotInstalled):
            missing.append(part.error)
        elif part.error is not None:
            document["untold"] = str(part.error)
    if missing and not any(document[part] is not None for part in parts if part != "keys"):
        raise missing[0]
    return document


def shown(document: dict[str, Any], console: Console) -> Group:
    """The document for people; what is missing says so."""
    makers: dict[str, Callable[[Any], Any]] = {
        "semaphores": lambda rows: semaphores(rows, console),
        "queues": queues,
        "mutexes": _mutexes,
        "timeouts": _timeouts,
        "keys": _keys,
    }
    parts: list[Any] = [note(document["database"])]
    for part, make in makers.items():
        rows = document[part]
        parts.append(title(part.capitalize()))
        if rows is None:
            why = document["untold"] if part == "keys" else None
            parts.append(sentence(why or f"not installed here: `{program()} check` tells what is", "yellow"))
        else:
            parts.append(make(rows))
    return Group(*parts)


def _mutexes(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None is taken")
    made = table("Mutex", "Queue", "Owner", "Since (UTC)", whole=("Since (UTC)",))
    for row in rows:
        cells = [name(row["queue"], "dim"), name(row["owner"]), second(row["acquired_at"])]
        made.add_row(name(row["id"]), *cells)
    return made


def _timeouts(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None was ever made")
    made = table("Timeout", "Queue", "Every", "Free in", "Retries left", right=("Every", "Free in", "Retries left"))
    for row in rows:
        free = int(row["free_in"]) < 0
        left = name("now", "green") if free else name(format_duration(int(row["free_in"])))
        cells = [name(format_duration(row["every"])), left, number(row["retries"])]
        made.add_row(name(row["id"]), name(row["queue"], "dim"), *cells)
    return made


def _keys(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return note("None is held")
    made = table("Key", "Mode", "Session", "Who", "Since (UTC)", "Waiting", whole=("Key", "Mode", "Session"))
    for row in rows:
        waiting = [name(f"{one['session']} {one['mode']}, {_who(one)}", "yellow") for one in row["waiting"]]
        cells = [name(row["mode"]), name(row["session"]), name(_who(row)), second(row["since"])]
        made.add_row(name(row["key"]), *cells, Text("\n").join(waiting) if waiting else name(None, "dim"))
    return made


def _who(session: dict[str, Any]) -> str:
    at = session["user"] if session["host"] is None else f"{session['user'] or ''}@{session['host']}"
    return ", ".join(part for part in (session["owner"], at, session.get("state")) if part) or "?"

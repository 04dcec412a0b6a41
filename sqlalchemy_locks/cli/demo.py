"""``demo``: processes compete for permits, one of them is killed, and a witness watches."""

from __future__ import annotations

import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text
from sqlalchemy import Engine

from .. import semaphore
from ..locks import Locks
from ..metadata import metadata
from .command import BAD, on_database
from .crowd import AWAY, HOLDS, TTL, WAITS, Names, Witness, work
from .screen import Screen, bar, sentence, table
from .target import Database, Target

_STATES = {AWAY: ("", ""), WAITS: ("waits", "dim"), HOLDS: ("holds a permit", "green")}
_MARKS = {True: ("✔", "green"), False: ("✘", "bold red")}
#: a process that has to start, or a permit that has to come back, is given so long on a busy machine, in seconds
_PATIENCE = 60.0


@dataclass(frozen=True)
class _Play:
    workers: int
    slots: int
    seconds: float


@click.command(short_help="See permits and locks hold.")
@click.option("--workers", type=click.IntRange(2, 32), default=6, show_default=True, help="So many processes.")
@click.option("--slots", type=click.IntRange(1, 16), default=2, show_default=True, help="So many permits.")
@click.option("--seconds", type=click.FloatRange(1, 600), default=6, show_default=True, help="How long they compete.")
@click.option("--url", metavar="URL", help="Where the locks are installed; without it, an SQLite file of its own.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document.")
def demo(workers: int, slots: int, seconds: float, url: str | None, as_json: bool) -> None:
    """See permits and locks hold: processes compete for them, and one is killed.

    A witness that knows nothing of locks counts how many are inside; the exit code is 1 if it ever saw too many.
    Without --url everything happens in a temporary file. With it, a semaphore of the demo's own is made there, and
    deleted again.

    \b
      sqlalchemy-locks demo
      sqlalchemy-locks demo --url postgresql+psycopg://app@localhost/app --workers 12 --slots 3
    """
    if workers <= slots + 1:
        raise click.UsageError("There must be two more --workers than --slots, or there is nothing to compete for.")
    play = _Play(workers, slots, seconds)
    with tempfile.TemporaryDirectory(prefix="sqlalchemy-locks-demo-") as folder:
        on = url or f"sqlite:///{Path(folder) / 'demo.db'}"
        _on_database(url=on, config=None, schema=None, prefix=None, as_json=as_json, play=play, own=url is None)


@on_database(make=True)
def _on_database(screen: Screen, database: Database, play: _Play, own: bool) -> int | None:
    place = database.target
    if place.url.get_dialect().is_async:
        raise click.UsageError(f"The demo's processes are synchronous, and {place.url.drivername} is not.")
    if own:
        metadata().create_all(database.engine)
    suffix = secrets.token_hex(3)
    names = Names(f"sqlalchemy-locks demo {suffix}", f"sqlalchemy-locks demo {suffix}")
    locks = Locks(database.engine)
    locks.run(semaphore.create(names.semaphore, play.slots, by="sqlalchemy-locks demo"))
    try:
        told = _compete(screen, database.engine, place, names, play)
    finally:
        _tidy(locks, names)
    good = all(true for true, _ in told)
    lines = [Text(f"{_MARKS[true][0]} ", style=_MARKS[true][1]) + Text(said) for true, said in told]
    screen.show({"ok": good, "checks": [{"ok": true, "says": said} for true, said in told]}, Text(), *lines)
    return None if good else BAD


def _tidy(locks: Locks, names: Names) -> None:
    holders: Any = locks.run(semaphore.holders(names.semaphore))
    for holder in holders:
        locks.release(holder.external_id)
    locks.run(semaphore.delete(names.semaphore, by="sqlalchemy-locks demo"))


def _compete(screen: Screen, engine: Engine, place: Target, names: Names, play: _Play) -> list[tuple[bool, str]]:
    context = multiprocessing.get_context("spawn")
    witness = Witness(play.workers, play.slots, context)
    options = dict(engine.get_execution_options())
    victim = play.workers - 1
    processes = [
        context.Process(target=work, args=(n, place.url, options, names, witness, n == victim), daemon=True)
        for n in range(play.workers)
    ]
    killed_at = came_back = None
    most = 0
    try:
        for process in processes:
            process.start()
        witness.ready.wait(timeout=_PATIENCE)
        with _watched(screen, place, witness) as show:
            _while(show, play.seconds / 2, lambda: True)
            _while(show, _PATIENCE, lambda: min(witness.turns) == 0)
            witness.victim_may.set()
            _while(show, _PATIENCE, lambda: not witness.victim_holds.is_set() and processes[victim].is_alive())
            if witness.victim_holds.is_set():
                processes[victim].kill()
                processes[victim].join()
                witness.set(victim, AWAY)
                killed_at = time.monotonic()
                most = witness.forget_most()
                _while(show, _PATIENCE, lambda: witness.most < play.slots)
                came_back = time.monotonic() - killed_at if witness.most >= play.slots else None
            _while(show, play.seconds / 2, lambda: True)
            failed = [n for n, process in enumerate(processes) if n != victim and not process.is_alive()]
            witness.stop.set()
            _while(show, _PATIENCE, lambda: any(process.is_alive() for process in processes))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()
    return _checks(witness, play, max(most, witness.most), came_back, failed, killed=killed_at is not None)


def _checks(
    witness: Witness, play: _Play, most: int, came_back: float | None, failed: list[int], *, killed: bool
) -> list[tuple[bool, str]]:
    turns = witness.turns
    done = sum(turns) - killed  # the one that was killed had its permit, and never came to the key
    back = "never came back" if came_back is None else f"was another's {came_back:.1f} s later (it was for {TTL:g} s)"
    return [
        (not failed, "no process failed but the one that was killed" if not failed else f"{len(failed)} failed"),
        (
            witness.overlaps == 0,
            f"{sum(turns)} turns, {most} inside at most, {witness.overlaps} times more than {play.slots}",
        ),
        (min(turns) > 0, f"everybody had a permit: the least lucky {min(turns)} times, the luckiest {max(turns)}"),
        (witness.counted == done, f"{done} times counted up under a key, and {witness.counted} is what was counted"),
        (killed and came_back is not None, f"one was killed with its permit, which {back}"),
    ]


def _while(show: Callable[[], None], seconds: float, goes_on: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and goes_on():
        show()
        time.sleep(0.05)


@contextmanager
def _watched(screen: Screen, place: Target, witness: Witness) -> Iterator[Callable[[], None]]:
    console = screen.console
    if screen.as_json or not console.is_terminal:
        if not screen.as_json:
            console.print(sentence(f"{witness.workers} processes compete for {witness.slots} permits, {place.shown}"))
        yield lambda: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show() -> None:
            lines = table("Process", "", "Turns", right=("Turns",))
            for number, (state, turns) in enumerate(zip(witness.states, witness.turns, strict=True), 1):
                word, style = _STATES[state]
                lines.add_row(f"{number}", Text(word.ljust(14), style=style), f"{turns}")
            head = Text("Permits ") + bar(witness.inside(), witness.slots, console)
            live.update(Group(sentence(f"In {place.shown}"), head, lines), refresh=True)

        yield show

"""`make demo`, or `python -m demo [URL]`: watch locks at work, and check that they work."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import BrokenBarrierError

from rich.console import Console
from rich.text import Text
from sqlalchemy import URL, NullPool, create_engine, select
from sqlalchemy.orm import Session

from .checks import Outcome, checks
from .database import Invoice, engine_name, new_database, upgrade
from .page import show
from .screen import Screen
from .witness import State, Witness, read_history
from .worker import VICTIM, Signals, run

WORKERS = 8
#: the timeout of a demo that hangs, in seconds
PATIENCE = 120
MARKS = {True: ("✔", "green"), False: ("✘", "bold red"), None: ("·", "yellow")}
NEXT = """\
Run it on a server of yours; the demo creates a database there, and drops it:
  make demo URL=postgresql+psycopg://user:password@localhost/postgres
  make demo URL=mysql+pymysql://root:password@localhost/mysql
Then read demo/worker.py, which is written like an app."""


def main() -> int:
    """Run the command line; return 0 when all checks have passed."""
    parser = argparse.ArgumentParser(prog="python -m demo")
    parser.add_argument("url", nargs="?", help="a server, e.g. postgresql+psycopg://...; without it, SQLite")
    parser.add_argument("--seconds", type=float, default=12, help="how long they compete (default: 12)")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    with new_database(arguments.url or None) as url, tempfile.TemporaryDirectory() as folder:
        name = engine_name(url)
        console.print(f"[bold]sqlalchemy-locks on {name}[/], {url.render_as_string()}\n")
        console.print("[bold]$ alembic upgrade heads")
        upgrade(url)
        console.print(f"\n{WORKERS} processes compete for 3 keys for {arguments.seconds:g} seconds:")
        if name == "SQLite":
            console.print("(SQLite has one write lock for all its data, so only one of them works at a time.)")
        good = report(console, compete(console, url, Path(folder), arguments.seconds))
        console.print(f"\n{NEXT}" if good else "\n[bold red]A guarantee was violated.", highlight=False)
        if good:
            show(console, url)
    return 0 if good else 1


def report(console: Console, outcome: Outcome) -> bool:
    """Print each guarantee and whether it was kept; return whether all were."""
    console.print()
    good = True
    for check in checks(outcome):
        good = good and check.true is not False
        mark, style = MARKS[check.true]
        console.print(Text(f"{mark} ", style=style) + Text(check.sentence))
    return good


def compete(console: Console, url: URL, folder: Path, seconds: float) -> Outcome:
    """Start the workers, kill one of them, stop the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run.__module__])  # imports take longer than what eight processes do in a second
    witness = Witness(WORKERS, folder, context)
    signals = Signals(WORKERS, context)
    workers = [
        context.Process(target=run, args=(number, url, witness, signals), daemon=True) for number in range(WORKERS)
    ]
    try:
        for worker in workers:
            worker.start()
        signals.ready.wait(timeout=PATIENCE)
        with Screen(console, witness) as screen:
            watch(screen, seconds / 3)
            signals.victim_may_begin.set()
            watch(screen, PATIENCE, until=lambda: signals.victim_holds.is_set() or not workers[VICTIM].is_alive())
            if signals.victim_holds.is_set():
                screen.log(f"Worker {VICTIM + 1} holds invoice:1, and is about to be killed")
                watch(screen, 1.5)
                kill(workers[VICTIM], witness)
                screen.log(f"Worker {VICTIM + 1} was killed (SIGKILL); the others continue")
            watch(screen, seconds / 3)
            # on a busy machine it may take longer until each of them had a turn
            watch(screen, PATIENCE, until=lambda: seen_enough(folder, witness, engine_name(url), workers))
            failed = [number for number, worker in enumerate(workers) if number != VICTIM and not worker.is_alive()]
            signals.stop.set()
            watch(screen, PATIENCE, until=lambda: not any(worker.is_alive() for worker in workers))
        failed += [number for number, worker in enumerate(workers) if worker.is_alive()]
    except BrokenBarrierError:
        raise SystemExit("The workers could not start; see the errors above.") from None
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
    with Session(create_engine(url, poolclass=NullPool)) as session:
        positions = {invoice.name: invoice.positions for invoice in session.scalars(select(Invoice))}
    return Outcome(engine_name(url), witness, read_history(folder), positions, failed)


def seen_enough(folder: Path, witness: Witness, engine: str, workers: list[ForkServerProcess]) -> bool:
    """Return whether the checks have everything they need, or a worker has failed."""
    if not all(worker.is_alive() for number, worker in enumerate(workers) if number != VICTIM):
        return True
    stays = read_history(folder)
    all_had_turns = {stay.worker for stay in stays} == set(range(WORKERS))
    shared = engine == "SQLite" or witness.most_sharers > 1
    killed = [stay.left for stay in stays if stay.worker == VICTIM and not stay.committed]
    freed = any("invoice:1" in stay.keys and killed and stay.entered > killed[-1] for stay in stays)
    return all_had_turns and shared and freed


def watch(screen: Screen, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Show the state for some seconds, or until a condition is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        screen.show()
        time.sleep(0.05)


def kill(victim: ForkServerProcess, witness: Witness) -> None:
    """Kill a worker that holds the first invoice. Its exit is recorded before, because it can't do so."""
    witness.write(VICTIM, "leaves", ("invoice:1",), False)
    witness.set(VICTIM, ("invoice:1",), State.AWAY)
    victim.kill()
    victim.join()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

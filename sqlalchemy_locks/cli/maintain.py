"""``sweep`` and ``vacuum``: the tasks of ``Locks.maintenance``, run once."""

from __future__ import annotations

from typing import Any

import click

from sqlalchemy_locks import lock
from sqlalchemy_locks.cli.base import database_command, duration_option
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, name, note, number, sentence, table
from sqlalchemy_locks.facade.locks import Locks


@click.command(short_help="Release abandoned permits.")
@duration_option(
    "--stale-after",
    default="24h",
    show_default=True,
    help="Also requests without a time to live that were not renewed for so long.",
)
@click.option("--expired-only", is_flag=True, help="Keep requests without a time to live, however old.")
@click.option("--due", is_flag=True, help="Run every sweep and clean-up that is due.")
@database_command()
def sweep(screen: Screen, database: Database, stale_after: float, expired_only: bool, due: bool) -> None:
    """Release abandoned permits: those whose time to live has ended, or that are stale.

    An app that runs `locks.maintenance()` doesn't need this. Otherwise run `sweep --due` from cron every minute, on
    any number of machines: one of them runs each task that is due.

    \b
      sqlalchemy-locks sweep
      sqlalchemy-locks sweep --stale-after 2h
      sqlalchemy-locks sweep --due
    """
    locks = Locks(database.engine)
    if due:
        with screen.progress("Running due tasks"):
            done = dict(locks.maintain().done)
        screen.show({"done": done}, _report(done))
        return
    with screen.progress("Sweeping"):
        swept = locks.sweep(stale_after=None if expired_only else stale_after)
    screen.show({"released": swept}, sentence(f"Released: {counted(swept, 'request')}", "green"))


def _report(done: dict[str, int]) -> Any:
    if not done:
        return note("Nothing was due, or other processes have done it")
    shown = table("Done", "Rows", right=("Rows",))
    for task, rows in done.items():
        shown.add_row(name(task), number(rows))
    return shown


@click.command(short_help="Delete unused keys of locks.")
@database_command()
def vacuum(screen: Screen, database: Database) -> None:
    """Delete the keys of locks that are not held from their table.

    PostgreSQL (except with the table bodies) and SQLite store no keys, and have nothing to delete.
    """
    with screen.progress("Removing keys"):
        removed = Locks(database.engine).run(lock.vacuum()) or 0
    screen.show({"removed": removed}, sentence(f"Removed: {counted(removed, 'key')}", "green"))

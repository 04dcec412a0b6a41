"""``sweep`` and ``vacuum``: what else ``Locks.maintenance`` does by itself."""

from __future__ import annotations

from typing import Any

import click

from sqlalchemy_locks import lock
from sqlalchemy_locks.cli.base import lasting, on_database
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, name, note, number, sentence, table
from sqlalchemy_locks.facade.locks import Locks


@click.command(short_help="Release permits that nobody will give back.")
@lasting(
    "--stale-after",
    default="24h",
    show_default=True,
    help="Also what has no time to live, and was neither renewed nor released for so long.",
)
@click.option("--expired-only", is_flag=True, help="Leave alone whatever has no time to live, however old.")
@click.option("--due", is_flag=True, help="Every sweep and clean-up that is due, and that nobody else has done.")
@on_database()
def sweep(screen: Screen, database: Database, stale_after: float, expired_only: bool, due: bool) -> None:
    """Release the permits that nobody will give back.

    An app that runs `locks.maintenance()` needs none of this. Without one, have `sweep --due` run from cron, every
    minute, on as many machines as you like: one of them does what is due.

    \b
      sqlalchemy-locks sweep
      sqlalchemy-locks sweep --stale-after 2h
      sqlalchemy-locks sweep --due
    """
    locks = Locks(database.engine)
    if due:
        with screen.progress("Doing what is due"):
            done = dict(locks.maintain().done)
        screen.show({"done": done}, _report(done))
        return
    with screen.progress("Sweeping"):
        swept = locks.sweep(stale_after=None if expired_only else stale_after)
    screen.show({"released": swept}, sentence(f"Released: {counted(swept, 'request')}", "green"))


def _report(done: dict[str, int]) -> Any:
    if not done:
        return note("Nothing was due, or others have done it")
    shown = table("Done", "Rows", right=("Rows",))
    for task, rows in done.items():
        shown.add_row(name(task), number(rows))
    return shown


@click.command(short_help="Remove the keys that nobody holds.")
@on_database()
def vacuum(screen: Screen, database: Database) -> None:
    """Remove the keys of locks that nobody holds from their table.

    PostgreSQL (but with the table bodies) and SQLite keep none, and have nothing to remove.
    """
    with screen.progress("Removing keys"):
        removed = Locks(database.engine).run(lock.vacuum()) or 0
    screen.show({"removed": removed}, sentence(f"Removed: {counted(removed, 'key')}", "green"))

"""``sweep``: the tasks of ``Locks.maintenance``, run once."""

from __future__ import annotations

import click

from sqlalchemy_locks.cli.base import database_command, duration
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, number, plain, table
from sqlalchemy_locks.facade.locks import Locks


@click.command(short_help="Release abandoned permits.")
@click.option(
    "--stale-after",
    type=duration,
    default="24h",
    show_default=True,
    help="Also requests without a time to live that were not renewed for so long.",
)
@click.option("--due", is_flag=True, help="Run every sweep and clean-up that is due.")
@database_command()
def sweep(screen: Screen, database: Database, stale_after: float, due: bool) -> None:
    """Release abandoned permits: those whose time to live has ended, or that are stale.

    An app that runs `locks.maintenance()` doesn't need this. Otherwise run `sweep --due` from cron every minute, on
    any number of machines: one of them runs each task that is due.

    \b
      sqlalchemy-locks sweep
      sqlalchemy-locks sweep --stale-after 2h
      sqlalchemy-locks sweep --due
    """
    locks = Locks(database.engine)
    if not due:
        released = locks.sweep(stale_after=stale_after)
        screen.show({"released": released}, plain(f"Released: {counted(released, 'request')}", "green"))
        return
    done = dict(locks.maintain().done)
    if not done:
        screen.show({"done": done}, plain("Nothing was due, or other processes have done it"))
        return
    rows = table("Done", "Rows", right=("Rows",))
    for task, count in done.items():
        rows.add_row(plain(task), number(count))
    screen.show({"done": done}, rows)

"""``queue``: stats, requeue, purge."""

from __future__ import annotations

from typing import Any

import click

from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.cli.base import Group, confirmed, lasting, on_database
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, name, note, number, second, sentence, table
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue.queue import Queue

_BATCH = 1000
_NAMED = click.argument("called", metavar="[QUEUE]", required=False)


@click.group(cls=Group, short_help="Look at the queue; give jobs back, delete jobs.")
def queue() -> None:
    """The shipped queue: what is in it, jobs given back, jobs deleted.

    \b
      sqlalchemy-locks queue stats
      sqlalchemy-locks queue requeue mail --dead
      sqlalchemy-locks queue purge --older-than 7d
    """


@queue.command()
@_NAMED
@on_database()
def stats(screen: Screen, database: Database, called: str | None) -> None:
    """How many jobs wait, are scheduled, run, or have died, queue by queue.

    Queues with completed jobs only don't appear.
    """
    rows = [row for row in overview.queues(Locks(database.engine)) if called in (None, row["queue_id"])]
    screen.show({"queues": rows}, queues(rows))


def queues(rows: list[dict[str, Any]]) -> Any:
    """The jobs of each by their state."""
    if not rows:
        return note("No jobs")
    states = ("Waiting", "Scheduled", "Running", "Dead")
    shown = table("Queue", *states, "Oldest waits since (UTC)", right=states, whole=("Oldest waits since (UTC)",))
    for row in rows:
        cells = [number(row[state.lower()]) for state in states]
        if row["dead"]:
            cells[3].stylize("red")
        shown.add_row(name(row["queue_id"]), *cells, second(row["oldest"]))
    return shown


@queue.command()
@_NAMED
@lasting(
    "--stalled-for",
    default="5m",
    show_default=True,
    help="Running jobs whose worker wasn't heard of for so long.",
)
@click.option("--dead", is_flag=True, help="Jobs that have died, instead: to be tried as often as new ones.")
@click.option("--job", metavar="UUID", help="The one dead job with this external id.")
@on_database()
def requeue(
    screen: Screen, database: Database, called: str | None, stalled_for: float, dead: bool, job: str | None
) -> None:
    """Give jobs back to be worked on: stalled ones, or dead ones.

    Of a stalled job the attempt counts, and the last one is a death. Several times the workers' heartbeat is a good
    --stalled-for: a worker that lives, and was only slow, loses its job to another.
    """
    jobs = Queue()
    if job is not None and called is not None:
        raise click.UsageError("--job names one job, of whatever queue: leave QUEUE out.")
    if job is not None:
        operation = jobs.revive(external_id=job)
    elif dead:
        operation = jobs.revive(queue=called, limit=_BATCH)
    else:
        operation = jobs.requeue_stalled(stalled_for, queue=called, limit=_BATCH)
    given_back = _in_batches(screen, database, operation, "Requeueing")
    what = "dead" if dead or job is not None else "stalled"
    said = f"Given back: {counted(given_back, f'{what} job')}"
    screen.show({"requeued": given_back, "which": what}, sentence(said, "green"))


@queue.command()
@lasting("--older-than", required=True, help="Only what ended so long ago, e.g. 7d; 0 is all of it.")
@click.option("--dead", is_flag=True, help="Jobs that have died, instead of completed ones.")
@click.option("--queue", "called", metavar="QUEUE", help="Those of this queue alone.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@on_database()
def purge(screen: Screen, database: Database, older_than: float, dead: bool, called: str | None, yes: bool) -> None:
    """Delete jobs that have ended, of all queues or of one: completed ones, or dead ones.

    What waits or runs stays. With a job its external id is forgotten: put again, it is another job.
    """
    what = "dead" if dead else "completed"
    operation = Queue().delete_finished(older_than, dead=dead, queue=called, limit=_BATCH)
    since = f" that ended more than {format_duration(older_than)} ago" if older_than else ""
    where = "all queues" if called is None else f"the queue {called!r}"
    confirmed(f"Delete the {what} jobs of {where}{since}, in {database.target.shown}?", yes, screen)
    deleted = _in_batches(screen, database, operation, "Deleting")
    screen.show({"deleted": deleted, "which": what}, sentence(f"Deleted: {counted(deleted, f'{what} job')}", "green"))


def _in_batches(screen: Screen, database: Database, operation: Operation[Any], what: str) -> int:
    locks, done = Locks(database.engine), 0
    with screen.progress(what) as advance:
        while batch := locks.run(operation) or 0:
            done += batch
            advance(batch)
    return done

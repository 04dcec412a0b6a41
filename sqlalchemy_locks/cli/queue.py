"""``queue``: statistics; jobs shown, cancelled, rescheduled, requeued or purged; queues paused."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, Group, confirm, database_command, duration_option
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, name, note, number, second, sentence, table
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue.queue import Queue

_BATCH = 1000
_QUEUE = click.argument("queue_id", metavar="[QUEUE]", required=False)


@click.group(cls=Group, short_help="Show, cancel, requeue and purge jobs; pause queues.")
def queue() -> None:
    """The shipped queue: statistics, single jobs, requeueing, purging, pauses.

    \b
      sqlalchemy-locks queue stats
      sqlalchemy-locks queue pause mail
      sqlalchemy-locks queue cancel 6f1c1f64-5b3c-4bd2-8a3a-2f0c2b8d1f3e
      sqlalchemy-locks queue requeue mail --dead
      sqlalchemy-locks queue purge --older-than 7d
    """


@queue.command()
@_QUEUE
@database_command()
def stats(screen: Screen, database: Database, queue_id: str | None) -> None:
    """Count the waiting, scheduled, running and dead jobs of each queue.

    Queues that have only completed jobs are left out.
    """
    rows = [row for row in overview.queues(Locks(database.engine)) if queue_id in (None, row["queue_id"])]
    screen.show({"queues": rows}, queue_table(rows))


def queue_table(rows: list[dict[str, Any]]) -> Any:
    """Return a table of queues with their jobs by state."""
    if not rows:
        return note("No jobs")
    states = ("Waiting", "Scheduled", "Running", "Dead")
    shown = table("Queue", *states, "Oldest waits since (UTC)", right=states, whole=("Oldest waits since (UTC)",))
    for row in rows:
        cells = [number(row[state.lower()]) for state in states]
        if row["dead"]:
            cells[3].stylize("red")
        paused = " (paused)" if row.get("paused") else ""
        shown.add_row(name(f"{row['queue_id']}{paused}"), *cells, second(row["oldest"]))
    return shown


@queue.command()
@_QUEUE
@duration_option(
    "--stalled-for",
    default="5m",
    show_default=True,
    help="Running jobs whose worker has sent no heartbeat for so long.",
)
@click.option("--dead", is_flag=True, help="Dead jobs instead, with all their attempts restored.")
@click.option("--job", metavar="UUID", help="The one dead job with this external id.")
@database_command()
def requeue(
    screen: Screen, database: Database, queue_id: str | None, stalled_for: float, dead: bool, job: str | None
) -> int | None:
    """Return stalled or dead jobs to the queue.

    A stalled job's attempt counts; after its last attempt the job is dead. Make --stalled-for several times the
    workers' heartbeat: a worker that is only slow would lose its job to another.
    """
    jobs = Queue()
    if job is not None and queue_id is not None:
        raise click.UsageError("--job names one job, in any queue: leave QUEUE out.")
    if job is not None:
        operation = jobs.revive(external_id=job)
    elif dead:
        operation = jobs.revive(queue=queue_id, limit=_BATCH)
    else:
        operation = jobs.requeue_stalled(stalled_for, queue=queue_id, limit=_BATCH)
    requeued = _in_batches(screen, database, operation, "Requeueing")
    what = "dead" if dead or job is not None else "stalled"
    done = {"requeued": requeued, "which": what}
    if job is not None and not requeued:
        exists = Locks(database.engine).run(jobs.get(job)) is not None
        screen.show(done, sentence(f"{job!r} is not dead" if exists else f"There is no job {job!r}", "yellow"))
        return EXIT_NEGATIVE
    screen.show(done, sentence(f"Requeued: {counted(requeued, f'{what} job')}", "green"))
    return None


@queue.command()
@duration_option(
    "--older-than", needs_unit=True, required=True, help="Only jobs that ended so long ago, e.g. 7d; 0 for all."
)
@click.option("--dead", is_flag=True, help="Dead jobs instead of completed ones.")
@click.option("--queue", "queue_id", metavar="QUEUE", help="Only this queue.")
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@database_command()
def purge(screen: Screen, database: Database, older_than: float, dead: bool, queue_id: str | None, yes: bool) -> None:
    """Delete completed or dead jobs, of all queues or of one.

    Waiting and running jobs are kept. A deleted job's external id is forgotten: put again, it makes a new job.
    """
    what = "dead" if dead else "completed"
    operation = Queue().delete_finished(older_than, dead=dead, queue=queue_id, limit=_BATCH)
    since = f" that ended more than {format_duration(older_than)} ago" if older_than else ""
    where = "all queues" if queue_id is None else f"the queue {queue_id!r}"
    confirm(f"Delete the {what} jobs of {where}{since}, in {database.location.display}?", yes, screen)
    deleted = _in_batches(screen, database, operation, "Deleting")
    screen.show({"deleted": deleted, "which": what}, sentence(f"Deleted: {counted(deleted, f'{what} job')}", "green"))


_JOB = click.argument("job", metavar="UUID")


@queue.command()
@_JOB
@database_command()
def show(screen: Screen, database: Database, job: str) -> int | None:
    """Show one job, by its external id, whatever its state."""
    found: Any = Locks(database.engine).run(Queue().get(job))
    if found is None:
        return _unknown(screen, job)
    row = dict(found._mapping)
    rows = table("Column", "Value")
    for column, value in row.items():
        rows.add_row(name(column), name(value))
    screen.show(row, rows)
    return None


@queue.command()
@_JOB
@database_command()
def cancel(screen: Screen, database: Database, job: str) -> int | None:
    """End a waiting job without running it. A running job isn't interrupted."""
    return _change(screen, database, job, Queue().cancel(job), "cancelled")


@queue.command()
@_JOB
@duration_option("--in", "run_in", help="So long from now, e.g. 2h; 0 for now.")
@click.option("--at", "run_at", metavar="TIME", help="This time, with its offset: 2030-01-31T12:00+00:00.")
@database_command()
def reschedule(screen: Screen, database: Database, job: str, run_in: float | None, run_at: str | None) -> int | None:
    """Change the earliest time to run a waiting job."""
    if (run_in is None) == (run_at is None):
        raise click.UsageError("Give --in or --at, and not both.")
    if run_at is None:
        assert run_in is not None
        operation = Queue().reschedule(job, run_in=run_in)
    else:
        try:
            # Python 3.10 doesn't read the Z that others write for UTC
            instant = datetime.fromisoformat(run_at.replace("Z", "+00:00"))
        except ValueError:
            raise click.BadParameter(f"{run_at!r} is no time: 2030-01-31T12:00+00:00 is.") from None
        if instant.tzinfo is None:
            raise click.BadParameter(f"{run_at!r} has no offset from UTC: {run_at}+00:00 has.")
        operation = Queue().reschedule(job, run_at=instant)
    return _change(screen, database, job, operation, "rescheduled")


def _change(screen: Screen, database: Database, job: str, operation: Operation[Any], what: str) -> int | None:
    locks = Locks(database.engine)
    if locks.run(operation):
        screen.show({"job": job, what: True}, sentence(f"{what.capitalize()}: {job!r}", "green"))
        return None
    row: Any = locks.run(Queue().get(job))
    if row is None:
        return _unknown(screen, job)
    ended = row.completed_at or row.failed_at
    screen.show({"job": job, what: False}, sentence(f"{job!r} {'has ended' if ended else 'is running'}", "yellow"))
    return EXIT_NEGATIVE


def _unknown(screen: Screen, job: str) -> int:
    screen.show({"job": job, "found": False}, sentence(f"There is no job {job!r}", "yellow"))
    return EXIT_NEGATIVE


_QUEUES = click.argument("queues", metavar="QUEUE...", nargs=-1, required=True)


@queue.command()
@_QUEUES
@database_command()
def pause(screen: Screen, database: Database, queues: tuple[str, ...]) -> None:
    """Pause queues: none of their jobs is captured. Running jobs continue, and new jobs wait."""
    paused = Locks(database.engine).run(Queue().pause(*queues)) or 0
    screen.show({"paused": paused}, sentence(f"Paused: {counted(paused, 'queue')}", "green"))


@queue.command()
@_QUEUES
@database_command()
def resume(screen: Screen, database: Database, queues: tuple[str, ...]) -> None:
    """Let jobs of paused queues be captured again."""
    resumed = Locks(database.engine).run(Queue().resume(*queues)) or 0
    screen.show({"resumed": resumed}, sentence(f"Resumed: {counted(resumed, 'queue')}", "green"))


def _in_batches(screen: Screen, database: Database, operation: Operation[Any], what: str) -> int:
    locks, done = Locks(database.engine), 0
    with screen.progress(what) as advance:
        while batch := locks.run(operation) or 0:
            done += batch
            advance(batch)
    return done

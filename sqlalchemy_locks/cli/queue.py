"""``queue``: queues, dead jobs and workers listed; jobs shown, cancelled, requeued, revived, purged; queues paused."""

from __future__ import annotations

from typing import Any

import click

from sqlalchemy_locks._validation import format_duration
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, database_command, duration
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, counted_up_to, plain, second, table
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.queue.queue import Queue

#: the maximum number of jobs that one transaction changes
_MAX_JOBS = 1000


@click.group(short_help="List queues, dead jobs and workers; revive, cancel and purge jobs; pause queues.")
def queue() -> None:
    """The shipped queue: its queues, dead jobs, workers, single jobs, pauses.

    \b
      sqlalchemy-locks queue list --dead
      sqlalchemy-locks queue revive mail
      sqlalchemy-locks queue workers
      sqlalchemy-locks queue pause mail
      sqlalchemy-locks queue cancel 6f1c1f64-5b3c-4bd2-8a3a-2f0c2b8d1f3e
      sqlalchemy-locks queue purge --older-than 7d
    """


@queue.command("list")
@click.argument("queue_id", metavar="[QUEUE]", required=False)
@click.option("--dead", is_flag=True, help="List dead jobs instead, the last ones first.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Maximum number of dead jobs.")
@database_command()
def list_(screen: Screen, database: Database, queue_id: str | None, dead: bool, limit: int) -> None:
    """List the queues with their jobs by state, or the dead jobs with their errors."""
    locks = Locks(database.engine)
    if dead:
        jobs = [dict(row._mapping) for row in locks.run(activity.dead(limit, queue_id))]
        screen.show({"dead": jobs}, _dead_table(jobs))
        return
    rows = [row for row in overview.queues(locks) if queue_id in (None, row["queue_id"])]
    screen.show({"queues": rows}, queue_table(rows))


@queue.command()
@database_command()
def workers(screen: Screen, database: Database) -> None:
    """List the workers: how many jobs each runs, and how long ago its last heartbeat was.

    Silent ones have sent none for 5 minutes: they are gone, or the database can't be reached from there.
    """
    rows = overview.workers(Locks(database.engine)).rows or []
    screen.show({"workers": rows}, worker_table(rows))


@queue.command()
@click.argument("queue_id", metavar="[QUEUE]", required=False)
@click.option(
    "--stalled-for",
    type=duration,
    default="5m",
    show_default=True,
    help="Running jobs whose worker has sent no heartbeat for so long.",
)
@database_command()
def requeue(screen: Screen, database: Database, queue_id: str | None, stalled_for: float) -> None:
    """Return stalled jobs to the queue, as workers do.

    A stalled job's attempt counts; after its last attempt the job is dead. Make --stalled-for several times the
    workers' heartbeat: a worker that is only slow would lose its job to another.
    """
    operation = Queue().requeue_stalled(stalled_for, queue=queue_id, limit=_MAX_JOBS)
    requeued = _in_batches(Locks(database.engine), operation)
    screen.show({"requeued": requeued}, plain(f"Requeued: {counted(requeued, 'stalled job')}", "green"))


@queue.command()
@click.argument("queue_id", metavar="[QUEUE]", required=False)
@click.option("--job", metavar="UUID", help="The one dead job with this id.")
@database_command()
def revive(screen: Screen, database: Database, queue_id: str | None, job: str | None) -> int | None:
    """Return dead jobs to the queue with all their attempts, once the cause of their failure is fixed."""
    jobs, locks = Queue(), Locks(database.engine)
    if job is None:
        revived = _in_batches(locks, jobs.revive(queue=queue_id, limit=_MAX_JOBS))
    elif queue_id is not None:
        raise click.UsageError("--job names one job, in any queue: leave QUEUE out.")
    else:
        revived = locks.run(jobs.revive(external_id=job)) or 0
        if not revived:
            reason = "There is no job" if locks.run(jobs.get(job)) is None else "Not dead:"
            screen.show({"revived": 0}, plain(f"{reason} {job!r}", "yellow"))
            return EXIT_NEGATIVE
    screen.show({"revived": revived}, plain(f"Revived: {counted(revived, 'dead job')}", "green"))
    return None


@queue.command()
@click.option(
    "--older-than", type=duration, required=True, help="Only jobs that ended so long ago, e.g. 7d; 0 for all."
)
@click.option("--dead", is_flag=True, help="Dead jobs instead of completed ones.")
@click.option("--queue", "queue_id", metavar="QUEUE", help="Only this queue.")
@click.confirmation_option(prompt="Delete these jobs?", help="Don't ask for confirmation.")
@database_command()
def purge(screen: Screen, database: Database, older_than: float, dead: bool, queue_id: str | None) -> None:
    """Delete completed or dead jobs, of all queues or of one.

    Waiting and running jobs are kept. A deleted job's external id is forgotten: put again, it makes a new job.
    """
    what = "dead" if dead else "completed"
    operation = Queue().delete_finished(older_than, dead=dead, queue=queue_id, limit=_MAX_JOBS)
    deleted = _in_batches(Locks(database.engine), operation)
    screen.show({"deleted": deleted, "which": what}, plain(f"Deleted: {counted(deleted, f'{what} job')}", "green"))


def _in_batches(locks: Locks, operation: Operation[Any]) -> int:
    total = 0
    while count := locks.run(operation) or 0:
        total += count
    return total


@queue.command()
@click.argument("job", metavar="UUID")
@database_command()
def show(screen: Screen, database: Database, job: str) -> int | None:
    """Show one job, by its external id, whatever its state."""
    row: Any = Locks(database.engine).run(Queue().get(job))
    if row is None:
        screen.show({"job": job, "found": False}, plain(f"There is no job {job!r}", "yellow"))
        return EXIT_NEGATIVE
    columns = dict(row._mapping)
    rows = table("Column", "Value")
    for column, value in columns.items():
        rows.add_row(plain(column), plain(value))
    screen.show(columns, rows)
    return None


@queue.command()
@click.argument("job", metavar="UUID")
@database_command()
def cancel(screen: Screen, database: Database, job: str) -> int | None:
    """End a waiting job without running it. A running job isn't interrupted."""
    if Locks(database.engine).run(Queue().cancel(job)):
        screen.show({"job": job, "cancelled": True}, plain(f"Cancelled: {job!r}", "green"))
        return None
    reason = f"There is no waiting job {job!r}: `queue show` shows it, if it exists"
    screen.show({"job": job, "cancelled": False}, plain(reason, "yellow"))
    return EXIT_NEGATIVE


@queue.command()
@click.argument("queues", metavar="QUEUE...", nargs=-1, required=True)
@database_command()
def pause(screen: Screen, database: Database, queues: tuple[str, ...]) -> None:
    """Pause queues: none of their jobs is captured. Running jobs continue, and new jobs wait."""
    paused = Locks(database.engine).run(Queue().pause(*queues)) or 0
    screen.show({"paused": paused}, plain(f"Paused: {counted(paused, 'queue')}", "green"))


@queue.command()
@click.argument("queues", metavar="QUEUE...", nargs=-1, required=True)
@database_command()
def resume(screen: Screen, database: Database, queues: tuple[str, ...]) -> None:
    """Let jobs of paused queues be captured again."""
    resumed = Locks(database.engine).run(Queue().resume(*queues)) or 0
    screen.show({"resumed": resumed}, plain(f"Resumed: {counted(resumed, 'queue')}", "green"))


def queue_table(rows: list[dict[str, Any]]) -> Any:
    """Return a table of queues: jobs by state."""
    if not rows:
        return plain("No jobs")
    states = ("Waiting", "Scheduled", "Running", "Stalled", "Dead")
    grid = table("Queue", *states, "Oldest waits since (UTC)", right=states, whole=("Oldest waits since (UTC)",))
    for row in rows:
        cells = [counted_up_to(row, state.lower()) for state in states]
        for cell, state, style in ((cells[3], "stalled", "yellow"), (cells[4], "dead", "red")):
            if row[state]:
                cell.stylize(style)
        paused = " (paused)" if row["paused"] else ""
        grid.add_row(plain(f"{row['queue_id']}{paused}"), *cells, second(row["oldest"]))
    return grid


def worker_table(rows: list[dict[str, Any]]) -> Any:
    """Return a table of workers."""
    if not rows:
        return plain("No workers")
    numbers = ("Running", "Last heartbeat", "Started")
    grid = table("Worker", *numbers, right=numbers)
    for row in rows:
        heartbeat = plain(f"{format_duration(row['silent'])} ago", "" if row["alive"] else "yellow")
        running = counted_up_to(row, "running")
        grid.add_row(plain(row["host"]), running, heartbeat, plain(f"{format_duration(row['age'])} ago"))
    return grid


def _dead_table(rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return plain("No dead jobs")
    whole = ("Job", "Died at (UTC)")
    grid = table("Job", "Queue", "Attempts", "Died at (UTC)", "Error", right=("Attempts",), whole=whole)
    for row in rows:
        attempts = plain(f"{row['attempts']} of {row['max_attempts']}")
        died, error = second(row["failed_at"]), plain(overview.error_line(row))
        grid.add_row(plain(row["external_id"]), plain(row["queue_id"]), attempts, died, error)
    return grid

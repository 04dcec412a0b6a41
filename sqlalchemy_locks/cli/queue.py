"""``queue``: jobs shown, cancelled, requeued or purged; queues paused."""

from __future__ import annotations

from typing import Any

import click

from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, database_command, duration
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, plain, table
from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue.queue import Queue

_BATCH = 1000


@click.group(short_help="Show, cancel, requeue and purge jobs; pause queues.")
def queue() -> None:
    """The shipped queue: single jobs, requeueing, purging, pauses. `status` counts its jobs.

    \b
      sqlalchemy-locks queue pause mail
      sqlalchemy-locks queue cancel 6f1c1f64-5b3c-4bd2-8a3a-2f0c2b8d1f3e
      sqlalchemy-locks queue requeue mail --dead
      sqlalchemy-locks queue purge --older-than 7d
    """


@queue.command()
@click.argument("queue_id", metavar="[QUEUE]", required=False)
@click.option(
    "--stalled-for",
    type=duration,
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
    jobs, locks = Queue(), Locks(database.engine)
    if job is not None and queue_id is not None:
        raise click.UsageError("--job names one job, in any queue: leave QUEUE out.")
    if job is not None:
        revived = locks.run(jobs.revive(external_id=job)) or 0
        document = {"requeued": revived, "which": "dead"}
        if revived:
            screen.show(document, plain("Requeued: 1 dead job", "green"))
            return None
        reason = "There is no job" if locks.run(jobs.get(job)) is None else "Not dead:"
        screen.show(document, plain(f"{reason} {job!r}", "yellow"))
        return EXIT_NEGATIVE
    if dead:
        what, operation = "dead", jobs.revive(queue=queue_id, limit=_BATCH)
    else:
        what, operation = "stalled", jobs.requeue_stalled(stalled_for, queue=queue_id, limit=_BATCH)
    requeued = _in_batches(locks, operation)
    screen.show({"requeued": requeued, "which": what}, plain(f"Requeued: {counted(requeued, f'{what} job')}", "green"))
    return None


@queue.command()
@click.option(
    "--older-than",
    type=duration,
    required=True,
    help="Only jobs that ended so long ago, e.g. 7d; 0 for all.",
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
    operation = Queue().delete_finished(older_than, dead=dead, queue=queue_id, limit=_BATCH)
    deleted = _in_batches(Locks(database.engine), operation)
    screen.show({"deleted": deleted, "which": what}, plain(f"Deleted: {counted(deleted, f'{what} job')}", "green"))


def _in_batches(locks: Locks, operation: Operation[Any]) -> int:
    done = 0
    while batch := locks.run(operation) or 0:
        done += batch
    return done


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

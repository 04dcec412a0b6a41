"""``worker``: run a worker that an app has made."""

from __future__ import annotations

import asyncio
import logging
import os
import pkgutil
import sys
from typing import TYPE_CHECKING

import click
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.cli.base import EXIT_ERROR, EXIT_INTERRUPTED
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.workers.events import ObservedWorker
from sqlalchemy_locks.workers.threaded import Worker

if TYPE_CHECKING:  # needs greenlet, which an app without an async driver doesn't have
    from sqlalchemy_locks.workers.asynchronous import AsyncWorker


@click.command(short_help="Run a worker of your app.")
@click.argument("target", metavar="MODULE:WORKER")
@click.option("--queue", metavar="NAME", help="Another queue than the worker's.")
@click.option("--concurrency", type=click.IntRange(1), metavar="NUMBER", help="Another number of handlers at a time.")
@click.option("--until-empty", is_flag=True, help="End when no job is due and none runs.")
def worker(target: str, queue: str | None, concurrency: int | None, until_empty: bool) -> None:
    """Run the Worker or AsyncWorker that is named WORKER in MODULE, or what a function of that name returns.

    On SIGTERM and SIGINT it starts no more jobs and waits for those that run, as long as its grace allows; a second
    signal ends it immediately. The current directory is searched for the module, too. Where the app configures no
    logging, warnings and errors are written to stderr.

    \b
      sqlalchemy-locks worker shop.jobs:worker
      sqlalchemy-locks worker shop.jobs:worker --queue mail --concurrency 16
    """
    app_worker = _resolve(target)
    if not logging.getLogger().handlers:  # the app hasn't configured any
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        app_worker.config.change(name=queue, concurrency=concurrency)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if not until_empty:  # cron mails what is printed
        place = Database(app_worker.config.engine).display
        click.echo(f"Working on the queue {app_worker.config.name!r} of {place}; Ctrl-C stops it.", err=True)
    try:
        if isinstance(app_worker, Worker):
            app_worker.run(until_empty=until_empty)
        else:
            asyncio.run(_run(app_worker, until_empty))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # a second Ctrl-C, for which Click would exit with 1
    except LockError as error:
        click.echo(f"sqlalchemy-locks: {error}", err=True)
        sys.exit(EXIT_ERROR)


async def _run(app_worker: AsyncWorker, until_empty: bool) -> None:
    await app_worker.run(until_empty=until_empty)
    # aiosqlite's threads would keep the process alive
    await greenlet_spawn(app_worker.config.engine.dispose)


def _resolve(target: str) -> Worker | AsyncWorker:
    if ":" not in target:
        raise click.UsageError(f"{target!r} is not MODULE:WORKER, for instance shop.jobs:worker.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        app_worker = pkgutil.resolve_name(target)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise click.UsageError(f"{target} can't be imported: {error}") from error
    if callable(app_worker) and not isinstance(app_worker, ObservedWorker):
        app_worker = app_worker()
    if not isinstance(app_worker, ObservedWorker):
        raise click.UsageError(f"{target} is no Worker or AsyncWorker: {app_worker!r}")
    return app_worker  # type: ignore[return-value]

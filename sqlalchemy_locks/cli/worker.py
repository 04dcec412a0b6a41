"""``worker``: run a worker that an app has made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import click
from sqlalchemy import Engine
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.cli.base import EXIT_ERROR, EXIT_INTERRUPTED
from sqlalchemy_locks.cli.connect import AppDatabaseUrl, HostApp
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
    found = _imported(target)
    if not logging.getLogger().handlers:  # the app hasn't configured any
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        found.config.change(name=queue, concurrency=concurrency)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if (app := click.get_current_context().find_object(HostApp)) is not None:
        found.handler = _in_context(found.handler, app.context, not isinstance(found, Worker))
    try:
        if isinstance(found, Worker):
            _begin(found, until_empty)
            found.run(until_empty=until_empty)
        else:
            asyncio.run(_run(found, until_empty))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # a second Ctrl-C, for which Click would exit with 1
    except LockError as error:
        raise _NotDone(str(error)) from None


def _begin(found: Worker | AsyncWorker, until_empty: bool) -> None:
    """Connect once: a wrong URL ends the command, which a database that is lost later doesn't."""
    engine: Engine = found.config.engine
    location = AppDatabaseUrl.of(engine)
    try:
        with engine.connect():
            pass
    except Exception as error:
        why = " ".join(str(getattr(error, "orig", None) or error).split())
        raise _NotDone(f"{location.display}: {location.redact(why)}") from error
    if not until_empty:  # cron mails what is printed
        click.echo(f"Working on the queue {found.config.name!r} of {location.display}; Ctrl-C stops it.", err=True)


def _in_context(handler: Any, context: Callable[[], contextlib.AbstractContextManager[object]], is_async: bool) -> Any:
    """Return the handler in a context of the app for each job, as ``db.session`` of Flask-SQLAlchemy needs."""
    if is_async:

        @functools.wraps(handler)
        async def awaited(job: Any) -> object:
            with context():
                return await handler(job)

        return awaited

    @functools.wraps(handler)
    def handle(job: Any) -> object:
        with context():
            return handler(job)

    return handle


class _NotDone(click.ClickException):
    exit_code = EXIT_ERROR


async def _run(found: AsyncWorker, until_empty: bool) -> None:
    await greenlet_spawn(_begin, found, until_empty)
    await found.run(until_empty=until_empty)
    # aiosqlite's threads would keep the process alive
    await greenlet_spawn(found.config.engine.dispose)


def _imported(target: str) -> Worker | AsyncWorker:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise click.UsageError(f"{target!r} is not MODULE:WORKER, for instance shop.jobs:worker.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of something that the module imports
        raise click.UsageError(f"There is no module {module_name!r} here, or among the installed packages.") from None
    if not hasattr(module, name):
        raise click.UsageError(f"The module {module_name!r} has no {name!r}.")
    found: Any = getattr(module, name)
    if callable(found) and not _is_worker(found):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError):
            how = "name the Worker, or a function without arguments that returns one"
            raise click.UsageError(f"{target} is neither: {how}.") from None
        found = found()
    if not _is_worker(found):
        raise click.UsageError(f"{target} is no Worker or AsyncWorker: {found!r}")
    return found


def _is_worker(found: Any) -> TypeGuard[Worker | AsyncWorker]:
    return isinstance(found, ObservedWorker)

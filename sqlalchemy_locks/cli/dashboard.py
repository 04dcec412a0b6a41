"""``page``: serve the page of ``integrations.dashboard`` on this machine."""

from __future__ import annotations

import contextlib
import signal
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from sqlalchemy_locks.cli.base import database_command
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, plain
from sqlalchemy_locks.facade.locks import Locks

if TYPE_CHECKING:  # needs greenlet, which an app without an async driver doesn't have
    from sqlalchemy_locks.facade.async_locks import AsyncLocks


@click.command(short_help="Show everything in a browser.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0 chooses a free one."
)
@database_command()
def page(screen: Screen, database: Database, port: int) -> None:
    """Serve a page that shows what `status` shows, and more; Ctrl-C ends it.

    It is read-only and has no login: every user of this machine can open it. An app mounts the same page from
    `sqlalchemy_locks.integrations.dashboard`, with access control of its own.

    \b
      sqlalchemy-locks page
      sqlalchemy-locks page --port 0 --json
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise click.UsageError("The page needs Starlette and uvicorn: pip install 'sqlalchemy-locks[cli,dashboard]'.")
    from sqlalchemy_locks.integrations.dashboard.serving import served

    locks: AsyncLocks | Locks
    if database.engine.dialect.is_async:
        from sqlalchemy.ext.asyncio import AsyncEngine

        from sqlalchemy_locks.facade.async_locks import AsyncLocks

        locks = AsyncLocks(AsyncEngine(database.engine))
    else:
        locks = Locks(database.engine)
    stopped = threading.Event()
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(served(locks, port))
        except OSError as error:
            raise click.UsageError(
                f"Port {port} can't be used ({error.strerror}): --port 0 chooses a free one."
            ) from None
        message = plain(f"{database.display} is shown at {address}; Ctrl-C ends it", "green")
        # before the first printed word, which names Ctrl-C; asyncio's own handler would wait for this thread
        signal.signal(signal.SIGINT, lambda *_: stopped.set())
        screen.show({"database": database.display, "address": address}, message)
        stopped.wait()

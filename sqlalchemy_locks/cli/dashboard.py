"""``page``: the page of ``integrations.dashboard``, on this machine."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec

import click

from sqlalchemy_locks.cli.base import on_database, told_to_end
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, note, sentence
from sqlalchemy_locks.facade.locks import Locks

#: so long Ctrl-C may go unseen, in seconds
_GLANCE = 0.1


@click.command(short_help="Look at all of it in a browser.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0 chooses a free one."
)
@on_database()
def page(screen: Screen, database: Database, port: int) -> None:
    """Serve a page that shows what `status` shows, and more; Ctrl-C ends it.

    It is read-only, on this machine alone, and for whoever is on it: there is no login. An app has the same page from
    `sqlalchemy_locks.integrations.dashboard`, for whom it lets see it.

    \b
      sqlalchemy-locks page
      sqlalchemy-locks page --port 0 --json
    """
    if find_spec("jinja2") is None:
        raise click.UsageError("The page needs Jinja2: pip install 'sqlalchemy-locks[cli,dashboard]'.")
    place = database.target
    if place.url.get_dialect().is_async:
        raise click.UsageError(f"The page is served synchronously, and {place.url.drivername} is not: name another.")
    from sqlalchemy_locks.integrations.dashboard.serving import served

    with contextlib.ExitStack() as opened:
        try:
            address = opened.enter_context(served(Locks(database.engine), port))
        except OSError as error:
            why = error.strerror
            raise click.UsageError(f"Port {port} is not to be had ({why}): --port 0 chooses another.") from None
        over = opened.enter_context(told_to_end())
        if screen.as_json:
            screen.line({"database": place.shown, "address": address})
        else:
            screen.show({}, sentence(f"{place.shown} is shown at {address}", "green"), note("Ctrl-C ends it"))
            sys.stdout.flush()
        while not over():
            database.sleep(_GLANCE)

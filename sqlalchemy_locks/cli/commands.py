"""The commands, under their names."""

from __future__ import annotations

import click

from .check import check
from .command import Group
from .install import install
from .page import page
from .queue import queue
from .semaphore import semaphore
from .status import status, top
from .upkeep import sweep, vacuum


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=False,
)
@click.version_option(package_name="sqlalchemy-locks", message="%(package)s %(version)s")
def commands() -> None:
    """Locks, semaphores and queues on the database that your app already runs.

    \b
    The database is named by --url, by --config alembic.ini, or by one of the variables
    SQLALCHEMY_LOCKS_URL and DATABASE_URL.

    \b
      sqlalchemy-locks install --url postgresql+psycopg://app@localhost/app
      sqlalchemy-locks check
      sqlalchemy-locks top
    """


for command in (install, check, status, top, page, semaphore, queue, sweep, vacuum):
    commands.add_command(command)

"""The group of all commands."""

from __future__ import annotations

import click

from sqlalchemy_locks.cli.check import check
from sqlalchemy_locks.cli.dashboard import page
from sqlalchemy_locks.cli.install import install
from sqlalchemy_locks.cli.queue import queue
from sqlalchemy_locks.cli.semaphore import semaphore
from sqlalchemy_locks.cli.status import status
from sqlalchemy_locks.cli.sweep import sweep
from sqlalchemy_locks.cli.worker import worker


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="sqlalchemy-locks", message="%(package)s %(version)s")
def commands() -> None:
    """Locks, semaphores and queues on the database that your app already runs.

    \b
    The database is named by --url, by --config alembic.ini, or by one of the variables
    SQLALCHEMY_LOCKS_URL and DATABASE_URL.

    \b
      sqlalchemy-locks install --url postgresql+psycopg://app@localhost/app
      sqlalchemy-locks check
      sqlalchemy-locks status

    Exit codes: 0 done, and all is well; 1 done, and the answer is negative; 2 not done.
    """


for command in (install, check, status, page, semaphore, queue, worker, sweep):
    commands.add_command(command)

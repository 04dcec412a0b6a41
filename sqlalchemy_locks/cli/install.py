"""``install``: create the tables and functions, for apps without Alembic."""

from __future__ import annotations

import click
import sqlalchemy as sa

from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, database_command
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, plain


@click.command(short_help="Install the tables and functions.")
@click.option("--grant-to", metavar="ROLE", multiple=True, help="A role that the app runs as; repeatable.")
@click.option(
    "--locking",
    type=click.Choice(["native", "advisory", "table"]),
    default="native",
    show_default=True,
    help="PostgreSQL, YugabyteDB: 'table' locks rows instead of advisory keys.",
)
@click.option("--again", is_flag=True, help="Repeat the installed steps: restores functions and grants.")
@database_command(create=True)
def install(screen: Screen, database: Database, grant_to: tuple[str, ...], locking: str, again: bool) -> int | None:
    """Install what locks need: a few tables and, on PostgreSQL, functions.

    An app with Alembic installs this by its revisions instead; use one of the two ways for a database. Run again, it
    adds the steps of a newer release. Existing tables are kept, with their data.

    \b
      sqlalchemy-locks install --url sqlite:///app.db
      sqlalchemy-locks install --url postgresql+psycopg://owner@localhost/app --grant-to app
    """
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
    from sqlalchemy_locks.alembic.options import Options
    from sqlalchemy_locks.alembic.steps import NO_HISTORY, STEPS, recorded

    options = {"schema": database.schema, "prefix": database.prefix, "grant_to": grant_to, "locking": locking}
    with database.engine.connect() as connection:
        installed = recorded(connection, Options(schema=database.schema, prefix=database.prefix)) or {}
        if installed and locking == "table" and "locked_keys" in sa.inspect(connection).get_view_names(database.schema):
            raise click.UsageError(
                "Advisory locks are installed, and processes that use them would not see locks of rows: uninstall them "
                "first, by Alembic's downgrade."
            )
    steps = [step for step in STEPS if again or grant_to or step not in installed]
    for step in steps:
        before = ("base", *STEPS)[STEPS.index(step)]
        # one transaction each, as the revisions have: on most engines DDL commits implicitly anyway
        with database.engine.begin() as connection:
            operations = Operations(MigrationContext.configure(connection, opts=dict(NO_HISTORY)))
            operations.upgrade_locks(from_=before, to=step, **options)  # type: ignore[attr-defined]
    newer = sorted(set(installed) - set(STEPS))
    document = {"database": database.display, "installed": steps, "steps": sorted({*installed, *STEPS}), "newer": newer}
    if steps:
        message = f"Installed in {database.display}: {', '.join(steps)}"
    else:
        message = f"Nothing to do in {database.display}: every step is installed, up to {STEPS[-1]}"
    warnings = [plain(f"Step {step} is from a newer release than this one", "yellow") for step in newer]
    last = plain("Run `sqlalchemy-locks check` to verify the installation.", "dim")
    screen.show(document, plain(message, "green"), *warnings, last)
    return EXIT_NEGATIVE if newer else None

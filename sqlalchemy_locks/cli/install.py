"""``install``: the tables and functions, for apps without Alembic."""

from __future__ import annotations

import click
import sqlalchemy as sa

from sqlalchemy_locks.cli.base import BAD, on_database, program
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, note, sentence


@click.command(short_help="Install the tables and functions.")
@click.option("--grant-to", metavar="ROLE", multiple=True, help="A role that the app runs as; may be given repeatedly.")
@click.option(
    "--locking",
    type=click.Choice(["native", "table"]),
    default="native",
    show_default=True,
    help="PostgreSQL: 'table' locks rows instead of advisory keys.",
)
@click.option("--again", is_flag=True, help="Run the steps again that are there: mends functions and grants.")
@on_database(make=True)
def install(screen: Screen, database: Database, grant_to: tuple[str, ...], locking: str, again: bool) -> int | None:
    """Install what locks need: a few tables and, on PostgreSQL, functions.

    An app with Alembic has this from its revisions instead, and one database takes one of the two ways. Run again, it
    brings the steps that a newer release has. What is there stays, data included.

    \b
      sqlalchemy-locks install --url sqlite:///app.db
      sqlalchemy-locks install --url postgresql+psycopg://owner@localhost/app --grant-to app
    """
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
    from sqlalchemy_locks.alembic.options import Options
    from sqlalchemy_locks.alembic.steps import STEPS, recorded

    place = database.target
    options = {"schema": place.schema, "prefix": place.prefix, "grant_to": grant_to, "locking": locking}
    with database.engine.connect() as connection:
        there = recorded(connection, Options(schema=place.schema, prefix=place.prefix)) or {}
        if there and locking == "table" and "locked_keys" in sa.inspect(connection).get_view_names(place.schema):
            raise click.UsageError(
                "What is installed locks advisory keys, and whoever uses it would not see locks of rows: uninstall it "
                "first, by Alembic's downgrade."
            )
    wanted = [step for step in STEPS if again or grant_to or step not in there]
    with screen.progress("Installing", len(wanted)) as advance:
        for step in wanted:
            before = ("base", *STEPS)[STEPS.index(step)]
            # each committed by itself, as the revisions are: on most engines DDL commits as it goes anyhow
            with database.engine.begin() as connection:
                operations = Operations(MigrationContext.configure(connection))
                operations.upgrade_locks(from_=before, to=step, **options)  # type: ignore[attr-defined]
            advance(1)
    newer = sorted(set(there) - set(STEPS))
    document = {"database": place.shown, "installed": wanted, "steps": sorted({*there, *STEPS}), "newer": newer}
    if wanted:
        said = sentence(f"Installed in {place.shown}: {', '.join(wanted)}", "green")
    else:
        said = sentence(f"Nothing to do in {place.shown}: every step is there, up to {STEPS[-1]}", "green")
    newer_said = [sentence(f"Step {step} is of a newer release, which is not this one", "yellow") for step in newer]
    screen.show(document, said, *newer_said, note(f"{program()} check tells whether all is well."))
    return BAD if newer else None

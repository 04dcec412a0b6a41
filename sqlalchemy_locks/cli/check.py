"""``check``: whether locks will work on this database."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.text import Text

from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, database_command
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, plain, table
from sqlalchemy_locks.health import Finding, examine

_LEVELS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


@click.command(short_help="Check whether locks will work here.")
@database_command()
def check(screen: Screen, database: Database) -> int | None:
    """Check whether locks will work on this database; it only reads.

    It checks the connection and the server's version; whether the server takes writes; the isolation level that
    sessions begin at, on YugabyteDB the effective one; settings that would break a promise; a pooler in between; both
    clocks; which steps are installed, whether the user may use them, and whether tables, indexes and
    functions are unchanged.

    \b
      sqlalchemy-locks check --url postgresql+psycopg://app@localhost/app
      sqlalchemy-locks check --json | jq '.findings[] | select(.level != "ok")'
    """
    with database.engine.connect() as connection:
        answer = f"{database.display} answers, through {connection.dialect.driver}"
        findings = [
            Finding("connection", "ok", answer),
            *examine(connection, schema=database.schema, prefix=database.prefix),
        ]
    count = {level: sum(each.level == level for each in findings) for level in _LEVELS}
    document = {
        "database": database.display,
        "ok": not count["problem"],
        "problems": count["problem"],
        "warnings": count["warning"],
        "findings": [asdict(each) for each in findings],
    }
    rows = table("", "", "")
    rows.show_header = False
    for each in findings:
        rows.add_row(plain(*_LEVELS[each.level]), plain(each.subject), plain(each.says))
    if count["problem"]:
        conclusion = Text(f"\n{counted(count['problem'], 'problem')}: locks don't work here as promised", "bold red")
    elif count["warning"]:
        conclusion = Text(f"\nLocks work here, with {counted(count['warning'], 'warning')}", "green")
    else:
        conclusion = Text("\nAll is well", "green")
    screen.show(document, rows, conclusion)
    return EXIT_NEGATIVE if count["problem"] else None

"""``check``: whether locks will hold here."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.text import Text

from sqlalchemy_locks._validation import escape_unprintable
from sqlalchemy_locks.cli.base import BAD, on_database
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, counted, table
from sqlalchemy_locks.health import Finding, examine

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


@click.command(short_help="Look whether locks will hold here.")
@on_database()
def check(screen: Screen, database: Database) -> int | None:
    """Look whether locks will hold here; it only reads.

    Looked at are the connection and the server's version; whether it takes writes; the isolation level that sessions
    begin at, on YugabyteDB the effective one; settings that would break a promise; a pooler in between; both clocks;
    what the user that it connects as may not do; which steps are installed, and whether tables, indexes and functions
    are still as they were.

    \b
      sqlalchemy-locks check --url postgresql+psycopg://app@localhost/app
      sqlalchemy-locks check --json | jq '.findings[] | select(.level != "ok")'
    """
    with database.engine.connect() as connection:
        dialect = connection.dialect
        says = f"{database.target.shown} answers, by {dialect.driver}, after {database.connected_in * 1000:.0f} ms"
        place = database.target
        found = [
            Finding("connection", "ok", says),
            *examine(connection, schema=place.schema, prefix=place.prefix),
        ]
    count = {level: sum(each.level == level for each in found) for level in _MARKS}
    document = {
        "database": place.shown,
        "ok": not count["problem"],
        "problems": count["problem"],
        "warnings": count["warning"],
        "findings": [asdict(each) for each in found],
    }
    lines = table("", "", "")
    lines.show_header = False
    for each in found:
        mark, style = _MARKS[each.level]
        lines.add_row(Text(mark, style=style), Text(each.subject), Text(escape_unprintable(each.says)))
    screen.show(document, lines, _conclusion(count["problem"], count["warning"]))
    return BAD if count["problem"] else None


def _conclusion(problems: int, warnings: int) -> Text:
    if problems:
        return Text(f"\n{counted(problems, 'problem')}: locks don't work here as promised", style="bold red")
    if warnings:
        return Text(f"\nLocks work here; {counted(warnings, 'thing')} to know", style="green")
    return Text("\nAll is well", style="green")

"""``semaphore``: create, resize, list, release, delete."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sqlalchemy_locks import semaphore as operations
from sqlalchemy_locks.cli.base import BAD, Group, confirmed, on_database, operator
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, bar, name, note, number, second, sentence, table, title
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.values import Released

_BY = click.option("--by", metavar="NAME", help="Who does it, for the records. [default: this machine's user]")
_CALLED = click.argument("called", metavar="NAME")
_CAPACITY = click.argument("capacity", type=click.IntRange(min=0))
_SAID = {
    Released.RELEASED: ("Released", "green"),
    Released.ALREADY_RELEASED: ("It was released before, or its time ran out and somebody took it back", "yellow"),
    Released.UNKNOWN: ("Nothing was ever acquired under this id, or it was long ago and is cleaned up", "red"),
}


@click.group(cls=Group, short_help="Make, change and look at semaphores.")
def semaphore() -> None:
    """Counting semaphores: make, change and look at them.

    \b
      sqlalchemy-locks semaphore create backup-slots 10
      sqlalchemy-locks semaphore list
      sqlalchemy-locks semaphore list backup-slots
      sqlalchemy-locks semaphore release job-abc-123
    """


@semaphore.command()
@_CALLED
@_CAPACITY
@_BY
@on_database()
def create(screen: Screen, database: Database, called: str, capacity: int, by: str | None) -> int | None:
    """Make a semaphore with so many permits.

    One that is there already stays as it is; if its capacity is another, the exit code is 1.
    """
    locks = Locks(database.engine)
    made = locks.run(operations.create(called, capacity, by=by or operator()))
    there = capacity if made else _capacity(locks, called)
    document = {"name": called, "capacity": there, "created": bool(made)}
    if made:
        screen.show(document, sentence(f"Made {called!r} with a capacity of {capacity:,}", "green"))
        return None
    known = "it is gone again" if there is None else f"with a capacity of {there:,}"
    screen.show(document, sentence(f"{called!r} is there already, {known}: `semaphore resize` changes it", "yellow"))
    return None if there == capacity else BAD


def _capacity(locks: Locks, called: str) -> int | None:
    rows: list[Any] = locks.run(operations.usage())
    return next((int(row.capacity) for row in rows if row.name == called), None)


@semaphore.command()
@_CALLED
@_CAPACITY
@_BY
@on_database()
def resize(screen: Screen, database: Database, called: str, capacity: int, by: str | None) -> None:
    """Change how many permits a semaphore has; it is recorded who did.

    Below what is held it evicts nobody, and nobody gets a permit until there is room: 0 closes it.
    """
    by = by or operator()
    was = Locks(database.engine).run(operations.resize(called, capacity, by=by))
    document = {"name": called, "old_capacity": was, "new_capacity": capacity, "by": by}
    screen.show(document, sentence(f"{called!r} has a capacity of {capacity:,} now; it was {was:,}", "green"))


@semaphore.command("list")
@click.argument("called", metavar="[NAME]", required=False)
@click.option("--history", is_flag=True, help="The last changes of capacity instead, newest first.")
@click.option(
    "--limit", type=click.IntRange(1, 2**31 - 1), default=100, show_default=True, help="How many changes at most."
)
@on_database()
def list_(screen: Screen, database: Database, called: str | None, history: bool, limit: int) -> int | None:
    """Show every semaphore, or the holders of one.

    What has expired is counted, and shown, until somebody takes it back: an acquire that needs the room, or a sweep.
    """
    locks = Locks(database.engine)
    if history:
        changes: list[Any] = locks.run(operations.history(called, limit=limit))
        screen.show({"history": [dict(row._mapping) for row in changes]}, _history(changes))
        return None
    rows = [dict(row._mapping) for row in locks.run(operations.usage()) if called in (None, row.name)]
    if called is None:
        screen.show({"semaphores": rows}, semaphores(rows, screen.console))
        return None
    if not rows:
        screen.show({"semaphores": [], "holders": []}, sentence(f"There is no semaphore {called!r}", "red"))
        return BAD
    held: list[Any] = locks.run(operations.holders(called))
    document = {"semaphores": rows, "holders": [dict(row._mapping) for row in held]}
    screen.show(document, semaphores(rows, screen.console), title("Holders"), _holders(held))
    return None


@semaphore.command()
@click.argument("external_id")
@on_database()
def release(screen: Screen, database: Database, external_id: str) -> int | None:
    """Give back the permits of a request, by the external id that it was acquired under.

    Its holder isn't told: it finds out when it renews, or when a guarded write is refused.
    """
    released = Locks(database.engine).release(external_id)
    said, style = _SAID[released]
    screen.show({"external_id": external_id, "released": str(released)}, sentence(f"{external_id!r}: {said}", style))
    return BAD if released is Released.UNKNOWN else None


@semaphore.command()
@_CALLED
@_BY
@click.option("--yes", is_flag=True, help="Don't ask.")
@on_database()
def delete(screen: Screen, database: Database, called: str, by: str | None, yes: bool) -> None:
    """Delete a semaphore that nobody holds a permit of.

    Its last fencing token is kept: one that is made again under this name goes on counting.
    """
    confirmed(f"Delete the semaphore {called!r} of {database.target.shown}?", yes, screen)
    Locks(database.engine).run(operations.delete(called, by=by or operator()))
    screen.show({"name": called, "deleted": True}, sentence(f"Deleted {called!r}", "green"))


def semaphores(rows: list[dict[str, Any]], console: Console) -> Any:
    """Used against capacity."""
    if not rows:
        return note("No semaphores")
    columns = ("Semaphore", "", "Used", "of", "Holders", "Oldest holder")
    shown = table(*columns, right=("Used", "of", "Holders"), whole=("",))
    for row in rows:
        used, capacity = int(row["used"]), int(row["capacity"])
        cells = [bar(used, capacity, console), number(used), number(capacity), number(row["holders"])]
        shown.add_row(name(row["name"]), *cells, name(row["oldest_owner"] or row["oldest_holder"], "dim"))
    return shown


def _holders(rows: list[Any]) -> Any:
    if not rows:
        return note("Nobody")
    instants = ("Since (UTC)", "Until (UTC)")
    shown = table("External id", "Owner", "Permits", "Fence", *instants, right=("Permits", "Fence"), whole=instants)
    for row in rows:
        until = name("its release") if row.expires_at is None else second(row.expires_at)
        if row.expired:
            until.stylize("red")
        cells = [name(row.owner), number(row.permits), number(row.fence), second(row.since)]
        shown.add_row(name(row.external_id), *cells, until)
    return shown


def _history(rows: list[Any]) -> Table | Any:
    if not rows:
        return note("No changes")
    shown = table("When (UTC)", "Semaphore", "From", "To", "By", right=("From", "To"), whole=("When (UTC)",))
    for row in rows:
        cells = [number(row.old_capacity), number(row.new_capacity), name(row.changed_by)]
        shown.add_row(second(row.changed_at), name(row.name), *cells)
    return shown

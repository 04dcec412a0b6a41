"""``semaphore``: create, resize, list, release, delete."""

from __future__ import annotations

from typing import Any

import click

from sqlalchemy_locks import semaphore as operations
from sqlalchemy_locks.cli.base import EXIT_NEGATIVE, database_command, operator
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.render import Screen, number, plain, second, table
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.values import Released

_BY = click.option(
    "--by", metavar="NAME", default=operator, help="Who is recorded with the change. [default: this machine's user]"
)
_NAME = click.argument("semaphore_id", metavar="NAME")
_CAPACITY = click.argument("capacity", type=click.IntRange(min=0))
_MESSAGES = {
    Released.RELEASED: ("Released", "green"),
    Released.ALREADY_RELEASED: ("It was released before, or freed after its time to live", "yellow"),
    Released.UNKNOWN: ("There is no such request: it was never acquired, or has been cleaned up", "red"),
}


@click.group(short_help="Create, change and list semaphores.")
def semaphore() -> None:
    """Counting semaphores: create, change and list them.

    \b
      sqlalchemy-locks semaphore create backup-slots 10
      sqlalchemy-locks semaphore list
      sqlalchemy-locks semaphore list backup-slots
      sqlalchemy-locks semaphore release job-abc-123
    """


@semaphore.command()
@_NAME
@_CAPACITY
@_BY
@database_command()
def create(screen: Screen, database: Database, semaphore_id: str, capacity: int, by: str) -> int | None:
    """Create a semaphore with a capacity.

    An existing semaphore is not changed; the exit code is 1 if its capacity differs.
    """
    locks = Locks(database.engine)
    created = locks.run(operations.create(semaphore_id, capacity, by=by))
    current = capacity if created else _capacity(locks, semaphore_id)
    document = {"name": semaphore_id, "capacity": current, "created": bool(created)}
    if created:
        screen.show(document, plain(f"Created {semaphore_id!r} with a capacity of {capacity:,}", "green"))
        return None
    state = "and has since been deleted" if current is None else f"with a capacity of {current:,}"
    screen.show(document, plain(f"{semaphore_id!r} existed, {state}: `semaphore resize` changes it", "yellow"))
    return None if current == capacity else EXIT_NEGATIVE


def _capacity(locks: Locks, semaphore_id: str) -> int | None:
    rows: list[Any] = locks.run(operations.usage(semaphore_id))
    return int(rows[0].capacity) if rows else None


@semaphore.command()
@_NAME
@_CAPACITY
@_BY
@database_command()
def resize(screen: Screen, database: Database, semaphore_id: str, capacity: int, by: str) -> None:
    """Change a semaphore's capacity, and record who did.

    Permits that are held stay held, even above the new capacity; none is granted until there is room. 0 closes it.
    """
    old = Locks(database.engine).run(operations.resize(semaphore_id, capacity, by=by))
    document = {"name": semaphore_id, "old_capacity": old, "new_capacity": capacity, "by": by}
    screen.show(document, plain(f"{semaphore_id!r} has a capacity of {capacity:,} now; it was {old:,}", "green"))


@semaphore.command("list")
@click.argument("semaphore_id", metavar="[NAME]", required=False)
@click.option("--history", is_flag=True, help="Show the last changes of capacity instead, newest first.")
@database_command()
def list_(screen: Screen, database: Database, semaphore_id: str | None, history: bool) -> int | None:
    """List all semaphores, or the holders of one.

    Expired permits are not used: they are shown until an acquire that needs the room, or a sweep, takes them back.
    """
    locks = Locks(database.engine)
    if history:
        changes: list[Any] = locks.run(operations.history(semaphore_id))
        screen.show({"history": [dict(row._mapping) for row in changes]}, _history_table(changes))
        return None
    rows = [dict(row._mapping) for row in locks.run(operations.usage(semaphore_id))]
    if semaphore_id is None:
        screen.show({"semaphores": rows}, semaphore_table(rows))
        return None
    if not rows:
        screen.show({"semaphores": [], "holders": []}, plain(f"There is no semaphore {semaphore_id!r}", "red"))
        return EXIT_NEGATIVE
    holders: list[Any] = locks.run(operations.holders(semaphore_id))
    document = {"semaphores": rows, "holders": [dict(row._mapping) for row in holders]}
    screen.show(document, semaphore_table(rows), plain("Holders", "bold"), _holder_table(holders))
    return None


@semaphore.command()
@click.argument("external_id")
@database_command()
def release(screen: Screen, database: Database, external_id: str) -> int | None:
    """Release the permits of a request, by the external id that it was acquired with.

    Its holder is not notified: its next renewal fails, and its guarded writes are refused.
    """
    released = Locks(database.engine).release(external_id)
    message, style = _MESSAGES[released]
    screen.show({"external_id": external_id, "released": str(released)}, plain(f"{external_id!r}: {message}", style))
    return EXIT_NEGATIVE if released is Released.UNKNOWN else None


@semaphore.command()
@_NAME
@_BY
@click.confirmation_option(prompt="Delete this semaphore?", help="Don't ask for confirmation.")
@database_command()
def delete(screen: Screen, database: Database, semaphore_id: str, by: str) -> None:
    """Delete a semaphore that has no holders.

    Its last fencing token is kept: a semaphore created again with this name continues from it.
    """
    Locks(database.engine).run(operations.delete(semaphore_id, by=by))
    screen.show({"name": semaphore_id, "deleted": True}, plain(f"Deleted {semaphore_id!r}", "green"))


def semaphore_table(rows: list[dict[str, Any]]) -> Any:
    """Return a table of semaphores: permits in use, and capacity."""
    if not rows:
        return plain("No semaphores")
    numbers = ("Used", "of", "Expired", "Holders")
    grid = table("Semaphore", *numbers, "Oldest holder", right=numbers)
    for row in rows:
        used, capacity = int(row["used"]), int(row["capacity"])
        cells = [number(used), number(capacity), number(int(row["expired"])), number(row["holders"])]
        if row["expired"]:
            cells[2].stylize("yellow")
        if used >= capacity:
            cells[0].stylize("red")
        grid.add_row(plain(row["name"]), *cells, plain(row["oldest_owner"] or row["oldest_holder"], "dim"))
    return grid


def _holder_table(rows: list[Any]) -> Any:
    if not rows:
        return plain("None")
    instants = ("Since (UTC)", "Until (UTC)")
    grid = table("Request", "Owner", "Permits", "Fence", *instants, right=("Permits", "Fence"), whole=instants)
    for row in rows:
        until = plain("its release") if row.expires_at is None else second(row.expires_at)
        if row.expired:
            until = plain(f"{until}, expired", "yellow")
        cells = [plain(row.owner), number(row.permits), number(row.fence), second(row.since)]
        grid.add_row(plain(row.external_id), *cells, until)
    return grid


def _history_table(rows: list[Any]) -> Any:
    if not rows:
        return plain("No changes")
    grid = table("When (UTC)", "Semaphore", "From", "To", "By", right=("From", "To"), whole=("When (UTC)",))
    for row in rows:
        cells = [number(row.old_capacity), number(row.new_capacity), plain(row.changed_by)]
        grid.add_row(second(row.changed_at), plain(row.name), *cells)
    return grid

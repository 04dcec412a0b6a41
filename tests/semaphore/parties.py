"""What the tests of a semaphore share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.runtime.local_queue import local_queues
from tests.operation.parties import BRIEFLY, ENGINES, EVERYWHERE, INNODB, SERVERS, unused

__all__ = [
    "BRIEFLY",
    "ENGINES",
    "EVERYWHERE",
    "INNODB",
    "SERVERS",
    "despite_deadlocks",
    "expire",
    "expire_in",
    "held",
    "in_memory",
    "made",
    "place",
    "request_of",
    "unused",
]

DAY_AGO = {
    "mysql": "renewed_at - INTERVAL 1 DAY",
    "mariadb": "renewed_at - INTERVAL 1 DAY",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', renewed_at, '-1 day')",
}


def place(engine: Engine | str, table: str) -> str:
    """A table's name in an engine's SQL."""
    name = engine if isinstance(engine, str) else engine.dialect.name
    return f"{'lock.' if name.startswith(('postgres', 'yuga')) else 'lock_'}{table}"


def made(engine: Engine, capacity: int, what: str = "semaphore") -> str:
    """The name of a new semaphore."""
    name = unused(what)
    assert sl.Locks(engine).run(sl.semaphore.create(name, capacity)) is True
    return name


def despite_deadlocks(engine: Engine, statement: str, **values: Any) -> int:
    """Execute a statement in a transaction of its own, again where InnoDB chose that as a deadlock's victim."""
    for _ in range(1000):
        try:
            with engine.begin() as connection:
                return connection.execute(text(statement), values).rowcount
        except DBAPIError as error:
            if not backend_for(engine.dialect).transient(error):
                raise
    raise AssertionError("a thousand times in a row")


def expire_in(engine: Engine, grant: Any) -> None:
    """As ``expire``, while others are at work."""
    day_ago = DAY_AGO.get(engine.dialect.name, "renewed_at - interval '1 day'")
    statement = f"UPDATE {place(engine, 'permit_request')} SET renewed_at = {day_ago} WHERE external_id = :id"
    assert despite_deadlocks(engine, statement, id=grant.external_id) == 1


def expire(connection: Any, grant: Any) -> None:
    """Have the time of a grant run out: as if it had been made a day ago."""
    day_ago = DAY_AGO.get(connection.dialect.name, "renewed_at - interval '1 day'")
    table = place(connection.dialect.name, "permit_request")
    ident = getattr(grant, "external_id", grant)
    changed = connection.execute(
        text(f"UPDATE {table} SET renewed_at = {day_ago} WHERE external_id = :id"), {"id": ident}
    )
    assert changed.rowcount == 1


def request_of(engine: Engine, grant: Any) -> int:
    """The number of the row of a request."""
    with engine.connect() as connection:
        statement = f"SELECT id FROM {place(engine, 'permit_request')} WHERE external_id = :id"
        return int(connection.execute(text(statement), {"id": grant.external_id}).scalar_one())


def held(engine: Engine, name: str) -> int:
    """How many permits of a semaphore are held, by its rows."""
    with engine.connect() as connection:
        (found,) = [row for row in connection.execute(sl.semaphore.usage()) if row.name == name]
        return int(found.used)


def in_memory(engine: Any, name: str) -> int:
    """How many of this process stand in the line of a semaphore."""
    turns = list(local_queues(engine.dialect).now.items())
    return sum(1 + len(turn.line or ()) for (key, _), turn in turns if key[0] == "line" and key[-1] == name)

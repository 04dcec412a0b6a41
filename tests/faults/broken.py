"""Known-broken versions of the patterns, as they are published or were once written: each has a checker that finds it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Update, select, text
from sqlalchemy.orm import Session

TABLES = (
    "CREATE TABLE IF NOT EXISTS broken_key (key BIGINT PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS broken_room (name VARCHAR(99) PRIMARY KEY, capacity INT, used INT)",
    "CREATE TABLE IF NOT EXISTS broken_permit (name VARCHAR(99), holder VARCHAR(99), count INT)",
    "CREATE TABLE IF NOT EXISTS broken_job (id INT PRIMARY KEY, status VARCHAR(20), claim INT)",
)


def install(connection: Connection) -> None:
    for table in TABLES:
        connection.execute(text(table))


class PublishedLock:
    """The article's ``lock.exclusive``: it doesn't look again when the row was deleted during its wait."""

    @staticmethod
    def exclusive(connection: Connection, key: int) -> None:
        connection.execute(text("INSERT INTO broken_key VALUES (:key) ON CONFLICT DO NOTHING"), {"key": key})
        connection.execute(text("SELECT 1 FROM broken_key WHERE key = :key FOR UPDATE"), {"key": key})

    @staticmethod
    def unlock(connection: Connection, key: int) -> None:
        connection.execute(text("DELETE FROM broken_key WHERE key = :key"), {"key": key})

    @staticmethod
    def try_exclusive(connection: Connection, key: int) -> bool:
        """A try whose INSERT waits for an uncommitted one."""
        connection.execute(text("INSERT INTO broken_key VALUES (:key) ON CONFLICT DO NOTHING"), {"key": key})
        found = text("SELECT 1 FROM broken_key WHERE key = :key FOR UPDATE SKIP LOCKED")
        return connection.scalar(found, {"key": key}) is not None


class NaiveSum:
    """Sum what is held and insert: above READ COMMITTED, the sum is older than the insert."""

    @staticmethod
    def acquire(connection: Connection, name: str) -> bool:
        locked = text("SELECT capacity FROM broken_room WHERE name = :name FOR UPDATE")
        capacity = connection.scalar(locked, {"name": name})
        used = text("SELECT COALESCE(SUM(count), 0) FROM broken_permit WHERE name = :name")
        return bool(connection.scalar(used, {"name": name}) < capacity)

    @staticmethod
    def insert(connection: Connection, name: str, holder: str) -> None:
        connection.execute(
            text("INSERT INTO broken_permit VALUES (:name, :holder, 1)"), {"name": name, "holder": holder}
        )


class Counter:
    """A counter of used permits, with a release that doesn't ask whether it was held."""

    @staticmethod
    def acquire(connection: Connection, name: str) -> bool:
        taken = text("UPDATE broken_room SET used = used + 1 WHERE name = :name AND used < capacity")
        return connection.execute(taken, {"name": name}).rowcount == 1

    @staticmethod
    def release(connection: Connection, name: str) -> None:
        connection.execute(text("UPDATE broken_room SET used = used - 1 WHERE name = :name"), {"name": name})


class SubqueryCapture:
    """``IN (SELECT … LIMIT n FOR UPDATE SKIP LOCKED)``, which the planner may execute once for each row."""

    @staticmethod
    def capture(connection: Connection, limit: int) -> list[int]:
        found = text(
            "UPDATE broken_job SET status = 'captured' WHERE id IN (SELECT id FROM broken_job WHERE status = 'ready'"
            " ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED) AND status = 'ready' RETURNING id"
        )
        return list(connection.scalars(found, {"limit": limit}))


class CountingClaim:
    """A claim that counts: after a rollback it is given again."""

    @staticmethod
    def capture(connection: Connection) -> tuple[int, int] | None:
        found = text(
            "UPDATE broken_job SET status = 'running', claim = claim + 1"
            " WHERE id = (SELECT id FROM broken_job WHERE status = 'ready' LIMIT 1) RETURNING id, claim"
        )
        row = connection.execute(found).first()
        return None if row is None else (row.id, row.claim)

    @staticmethod
    def fail(connection: Connection, job: tuple[int, int]) -> int:
        failed = text("UPDATE broken_job SET status = 'ready' WHERE id = :id AND claim = :claim AND status = 'running'")
        return connection.execute(failed, dict(zip(("id", "claim"), job, strict=True))).rowcount


class LoadedCapture:
    """Entities that are loaded, and changed by the flush: another session may have loaded them, too."""

    @staticmethod
    def capture(session: Session, entity: Any, where: Any) -> list[Any]:
        found = list(session.scalars(select(entity).where(*where).limit(1)))
        for each in found:
            each.status = "captured"
        return found


class CheckedWrite:
    """A write whose right is checked first, and not in its own transaction."""

    @staticmethod
    def is_newest(connection: Connection, fence: Any, where: Any, token: int) -> bool:
        return bool(connection.scalar(select(fence).where(where)) <= token)

    @staticmethod
    def is_held(connection: Connection, requests: Any, ident: str) -> bool:
        return connection.scalar(select(requests.c.external_id).where(requests.c.external_id == ident)) is not None

    @staticmethod
    def write(connection: Connection, statement: Update) -> bool:
        return connection.execute(statement).rowcount == 1

"""What a server's settings mean to locks, as sentences for people; it only reads.

The facts that an operation needs are in each engine's own file. These are for who sets a server up, or looks for what
is wrong with one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.engine import Connection

from sqlalchemy_locks.dialects.base import Backend
from sqlalchemy_locks.dialects.postgresql import process_told
from sqlalchemy_locks.errors import Unsupported

#: the oldest version that has all that is used here, and the oldest of those that this is made for
FLOORS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "PostgreSQL": ((12,), (15,)),
    "YugabyteDB": ((), ()),
    "MySQL": ((8, 0, 13), (8, 0, 13)),
    "MariaDB": ((10, 6), (10, 6)),
    "SQLite": ((3, 35), (3, 35)),
}
Level = Literal["ok", "warning", "problem"]
_COMMITTED = ("READ COMMITTED", "READ UNCOMMITTED")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    #: what: ``version``, ``isolation``, ``drift``, ...
    subject: str
    #: ``problem``: locks don't work, or not as promised; ``warning``: something to know
    level: Level
    #: what is so, and where it isn't well what to do, as a sentence
    says: str


def findings(connection: Connection, engine: Backend) -> Iterator[Finding]:
    """All that there is to say of a server, be it well or not."""
    yield from _TOLD[engine.locking](connection, engine)


def _version(name: str, spelt: str) -> Finding:
    floor, tested = FLOORS[name]
    found = tuple(int(part) for part in re.findall(r"\d+", spelt)[:3])
    what = f"{name} {spelt}"
    if found < floor:
        return Finding("version", "problem", f"{what} lacks what is needed: {_dotted(floor)} is the oldest that has it")
    if found < tested:
        return Finding("version", "warning", f"{what} is older than what this is made for, {_dotted(tested)}")
    return Finding("version", "ok", what)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _postgresql(connection: Connection, engine: Backend) -> Iterator[Finding]:
    def ask(sql: str) -> Any:
        return connection.exec_driver_sql(sql).scalar()

    told = str(ask("SELECT version()"))
    yugabyte = re.search(r"-YB-([\d.]+)", told)
    name = "YugabyteDB" if yugabyte else "PostgreSQL"
    yield _version(name, yugabyte[1] if yugabyte else str(ask("SHOW server_version")).split()[0])
    if ask("SELECT pg_is_in_recovery()"):
        yield Finding("writable", "problem", "this is a standby, whose locks bind nobody else: connect to the primary")
    elif ask("SHOW transaction_read_only") == "on":
        says = "sessions are read-only (default_transaction_read_only): every lock is refused"
        yield Finding("writable", "problem", says)
    else:
        yield Finding("writable", "ok", "the server takes writes")
    level = str(ask("SHOW transaction_isolation")).upper()
    if level in _COMMITTED:
        yield Finding("isolation", "ok", f"sessions begin at {level}")
    else:
        says = f"sessions begin at {level}, where a lock in a session of yours is refused; Locks sets its own level"
        yield Finding("isolation", "warning", says)
    if yugabyte:
        yield from _yugabyte(ask, level)
    yield from _between(connection, ask)


def _yugabyte(ask: Any, level: str) -> Iterator[Finding]:
    if ask("SELECT to_regprocedure('yb_get_effective_transaction_isolation_level()') IS NOT NULL"):
        effective = str(ask("SELECT yb_get_effective_transaction_isolation_level()")).upper()
    else:
        effective = str(ask("SELECT current_setting('yb_effective_transaction_isolation_level', true)") or "").upper()
    if not effective:
        yield Finding("effective isolation", "warning", "this YugabyteDB doesn't tell which level is in force")
    elif effective in _COMMITTED:
        yield Finding("effective isolation", "ok", f"{effective} is what it says")
    elif level in _COMMITTED:
        says = (
            f"what is called {level} is effectively {effective}, where every lock is refused: "
            "turn yb_enable_read_committed_isolation on in the cluster"
        )
        yield Finding("effective isolation", "problem", says)
    else:
        yield Finding("effective isolation", "warning", f"effectively {effective}, too")
    if ask("SELECT current_setting('yb_silence_advisory_locks_not_supported_error', true)") == "on":
        says = "yb_silence_advisory_locks_not_supported_error is on: session locks are refused, as they would be none"
        yield Finding("advisory locks", "warning", says)


def _between(connection: Connection, ask: Any) -> Iterator[Finding]:
    """A pooler tells the client of a server process of its own invention."""
    told = process_told(connection.connection.driver_connection)
    if told is None or told == ask("SELECT pg_backend_pid()"):
        return
    says = (
        "a pooler such as PgBouncer is between here and the server. Locks that end with their transaction are right "
        "in transaction mode, too; session locks (session_exclusive) are refused, and workers poll, unless the "
        "engine's execution option locks_session_pooling=True says that it is in session mode; drivers that prepare "
        "statements (psycopg, asyncpg) are to be told not to, unless it keeps track of them (PgBouncer 1.21, by "
        "max_prepared_statements); and statement mode is too little for any lock"
    )
    yield Finding("pooler", "warning", says)


def _innodb(connection: Connection, engine: Backend) -> Iterator[Finding]:
    def ask(sql: str) -> Any:
        return connection.exec_driver_sql(sql).scalar()

    yield _version(engine.name, re.split(r"[-+]", str(ask("SELECT VERSION()")))[0])
    if ask("SELECT @@global.read_only"):
        yield Finding("writable", "problem", "the server is read_only, as replicas are: locks there bind nobody else")
    else:
        yield Finding("writable", "ok", "the server takes writes")
    level = str(connection.get_isolation_level())
    if level in _COMMITTED:
        yield Finding("isolation", "ok", f"sessions begin at {level}")
    else:
        says = f"sessions begin at {level}: lock before you read there, or use Locks, which sets its own level"
        yield Finding("isolation", "warning", says)
    try:
        engine.verify(connection)
    except Unsupported as refusal:
        yield Finding("settings", "problem", str(refusal))
    else:
        yield Finding("settings", "ok", "innodb_rollback_on_timeout is off")


def _sqlite(connection: Connection, engine: Backend) -> Iterator[Finding]:
    def ask(sql: str) -> Any:
        return connection.exec_driver_sql(sql).scalar()

    yield _version(engine.name, str(ask("SELECT sqlite_version()")))
    path = connection.exec_driver_sql("PRAGMA database_list").all()[0][2]
    if not path:
        yield Finding("writable", "problem", "a database in memory is this process's alone: locks need a file")
    elif ask("PRAGMA query_only") or not os.access(path, os.W_OK):
        yield Finding(
            "writable", "problem", f"{path} can't be written to, so that no lock can be had: chmod u+w {path}"
        )
    elif not _journal_writable(path, str(ask("PRAGMA journal_mode"))):
        folder = os.path.dirname(path)
        says = f"the folder {folder} can't be written to, where SQLite keeps its journal: chmod u+w {folder}"
        yield Finding("writable", "problem", says)
    else:
        yield Finding("writable", "ok", "the file takes writes")
    busy = int(ask("PRAGMA busy_timeout") or 0)
    if busy:
        yield Finding("settings", "ok", f"who waits for the write lock waits {busy / 1000:g} s (busy_timeout)")
    else:
        yield Finding(
            "settings", "warning", "busy_timeout is 0: nobody waits for the write lock, whoever is second fails"
        )


def _journal_writable(path: str, mode: str) -> bool:
    """Whether a transaction can have its journal: a file beside the database, which most modes make anew each time."""
    if mode in ("memory", "off"):
        return True
    kept = [f"{path}-wal", f"{path}-shm"] if mode == "wal" else [] if mode == "delete" else [f"{path}-journal"]
    if kept and all(os.access(each, os.W_OK) for each in kept):
        return True
    return os.access(os.path.dirname(path), os.W_OK | os.X_OK)


_TOLD = {"functions": _postgresql, "rows": _innodb, "file": _sqlite}

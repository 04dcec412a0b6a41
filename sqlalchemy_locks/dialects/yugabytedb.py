"""YugabyteDB by the dialect name ``yugabytedb``; ``postgresql://`` URLs to it work as well.

The migration reads ``version()`` and, from 2025.1 on, the flag ``yb_enable_advisory_locks``. If the flag is on, it
installs PostgreSQL's functions: their advisory locks hold in the whole cluster. Otherwise it installs functions that
lock rows of ``lock.locked_keys``.

- A wait for a row ends at ``statement_timeout``, which an earlier statement has to set, and not at ``lock_timeout``.
- Waiters for permits poll: YugabyteDB's advisory locks don't serve waiters in order.
- Listeners are notified where ``yb_enable_listen_notify`` is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.dialects.base import COMMITTED
from sqlalchemy_locks.dialects.findings import Finding
from sqlalchemy_locks.dialects.postgresql import PostgreSQL
from sqlalchemy_locks.errors import LockError, LockTimeout

#: some of its errors when the wait for an advisory lock has timed out
_TIMED_OUT = ("Timed out waiting for Acquire Advisory Lock", "Timed out waiting kResponseSent")


class YugabyteDB(PostgreSQL):
    name = "YugabyteDB"
    server_queues = None
    functions_limit_waits = False
    wait_setting = "statement_timeout"
    #: below a second, a statement that waits for nobody could time out between regions
    shortest_wait = 1

    def translate(self, error: DBAPIError) -> LockError | None:
        ours = super().translate(error)
        if isinstance(ours, LockTimeout) or any(phrase in str(error.orig) for phrase in _TIMED_OUT):
            return LockTimeout(
                "the lock was not free in time (lock_timeout, or for rows statement_timeout), or another session ended "
                "the statement"
            )
        return ours

    def findings(self, connection: Connection) -> Iterator[Finding]:
        yield from super().findings(connection)

        def ask(sql: str) -> Any:
            return connection.exec_driver_sql(sql).scalar()

        level = str(ask("SHOW transaction_isolation")).upper()
        if ask("SELECT to_regprocedure('yb_get_effective_transaction_isolation_level()') IS NOT NULL"):
            effective = str(ask("SELECT yb_get_effective_transaction_isolation_level()")).upper()
        else:
            setting = "SELECT current_setting('yb_effective_transaction_isolation_level', true)"
            effective = str(ask(setting) or "").upper()
        if not effective:
            says = "this version of YugabyteDB doesn't say which level is in force"
            yield Finding("effective isolation", "warning", says)
        elif effective in COMMITTED:
            yield Finding("effective isolation", "ok", f"{effective} is in force")
        elif level in COMMITTED:
            says = (
                f"what is called {level} is effectively {effective}, where every lock is refused: "
                "turn yb_enable_read_committed_isolation on in the cluster"
            )
            yield Finding("effective isolation", "problem", says)
        else:
            yield Finding("effective isolation", "warning", f"effectively {effective}, too")
        if ask("SELECT current_setting('yb_silence_advisory_locks_not_supported_error', true)") == "on":
            says = (
                "yb_silence_advisory_locks_not_supported_error is on: session locks and the functions that acquire "
                "advisory locks are refused, as they would not lock"
            )
            yield Finding("advisory locks", "warning", says)


BACKEND = YugabyteDB()

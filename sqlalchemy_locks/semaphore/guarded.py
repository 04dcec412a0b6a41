"""guarded: a write in the same database that only the current holder of permits can make.

A holder can be stopped for longer than its ttl, and then continue. Therefore the request's row is checked, and locked
in shared mode until the write's transaction ends. Until then the permits can't be released or swept. In a cluster in
which several nodes accept writes, the row is also changed: of a write and a release on two nodes, only one can commit.
"""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import Update, inspect, text

from sqlalchemy_locks.core.entities import entity_of
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, execute_in_session
from sqlalchemy_locks.core.typing import BOOL_ROW, shaped
from sqlalchemy_locks.errors import LockLost, Unsupported
from sqlalchemy_locks.semaphore.base import SemaphoreImpl, hold_request, identity_of
from sqlalchemy_locks.semaphore.statements import RELEASED
from sqlalchemy_locks.values import Grant

# MySQL and MariaDB have no limit of idle time that ends with the transaction, so the session's is set and restored
_LIMIT_IDLE = text(
    "SET @sqlalchemy_locks_guarded = COALESCE(@sqlalchemy_locks_guarded, @@session.wait_timeout),"
    " SESSION wait_timeout = CAST(LEAST(@@session.wait_timeout, :seconds) AS UNSIGNED)"
)
_RESTORE_IDLE = text(
    "SET SESSION wait_timeout = CAST(@sqlalchemy_locks_guarded AS UNSIGNED), @sqlalchemy_locks_guarded = NULL"
)


class Guarded(SemaphoreImpl):
    name = "guarded"

    def __init__(self, statement: Update) -> None:
        super().__init__()
        self.update = statement
        entity = entity_of(statement)
        self.mapper: Any = None if entity is statement.table else inspect(entity)

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "since the permits are checked, and locked, before the write"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return False

    def check_connection(self, execution: Execution) -> None:
        super().check_connection(execution)
        if execution.backend.key_rows:
            self.refuse_two_phase(execution)

    def run(self, execution: Execution) -> bool:
        # not the base's run(): its limit of waits would also apply to the write, which is the app's own
        ident, token = execution.values["external_id"], execution.values["token"]
        with execution.waiting():
            if execution.backend.single_writer:
                self._lock_file(execution)
            request = hold_request(execution, self.statements(execution))
        if request is None or request.state == RELEASED or request.expired or token not in (None, request.token):
            names = ", ".join(map(repr, execution.values["names"]))
            permits = f"{names} (request {ident!r})" if names else f"the request {ident!r}"
            raise LockLost(
                f"the permits of {permits} are held no longer, so the write was not made: "
                f"{'there is no such request' if request is None else 'they were released, or their time ran out'}"
            )
        if execution.backend.key_rows and execution.begun_by_locks and request.ttl_seconds is not None:
            # Locks restores the setting before it returns the connection
            execution.connection.execution_options(locks_on_return=_RESTORE_IDLE)
            execution.execute(_LIMIT_IDLE, {"seconds": math.ceil(min(request.ttl_seconds, 31_536_000))})
        if execution.session is not None and self.mapper is not None:
            result: Any = execute_in_session(execution, self.update, {})
        else:
            result = execution.connection.execute(self.update, execution_options=execution.options)
        return bool(result.rowcount)

    def route(self) -> dict[str, Any]:
        return {"clause": self.update} if self.mapper is None else {"mapper": self.mapper, "clause": self.update}


@shaped(BOOL_ROW)
def guarded(statement: Update, grant: Grant | str) -> Operation[Any]:
    """Run an UPDATE only while permits are held, and keep them held until its transaction ends.

    :param statement: an UPDATE of the same database, of a table or a mapped class, without RETURNING.
    :param grant: the grant that ``acquire`` returned, or its external id. If blocks use the id, pass the grant: by then
        the id may belong to a later request.
    :return: ``True`` when it was written, ``False`` when no row matches the statement's own condition.
    :raises LockLost: when the permits were released or swept, or their time ran out; nothing is written.
    :raises OutcomeUnknown: from ``Locks.run``, when the connection died before the reply; it may be written. It is a
        ``LockLost`` as well: catch it first.
    :raises LockTimeout: when the release of this request, under way elsewhere, took longer than the wait that the
        database, or the option ``locks_wait`` (seconds), allows.

    Unlike a fencing token it serves any capacity, and needs no column. Until its transaction ends, ``renew`` and
    ``release`` of this request wait, and the permits may expire: commit within the ttl. If the transaction sends
    nothing for longer than the ttl, for instance because its process is stopped, the server ends it. On MySQL and
    MariaDB this applies only to transactions of ``Locks``: for a session of your own, change a setting of the server
    (``docs/lease.md``).

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, ttl=60))
    >>> session.scalar(sl.guarded(update(Document).where(Document.id == 1).values(body=text), grant))
    """
    if not isinstance(statement, Update):
        raise TypeError(
            f"guarded takes an UPDATE, not {statement!r}: guard an UPDATE of a row of yours, and write the rest after "
            "it in the same transaction, which the grant guards until it ends"
        )
    if len(statement.exported_columns):
        raise Unsupported("guarded answers True or False: leave RETURNING out of its statement, and read afterwards")
    if isinstance(grant, Grant) and not grant.acquired:
        raise LockLost(f"the request {grant.external_id!r} was not granted: there is nothing to write under")
    names = list(grant.permits) if isinstance(grant, Grant) else ()
    return Operation(Guarded(statement), {**identity_of(grant), "names": names})

"""guarded: a write in the same database that only who still holds its permits can make.

A holder can be stopped for longer than its time, and go on. What a lock service outside the database can only ask
the application to remember is one look here: the request's row is locked, shared, until the write's transaction
ends, and nobody can take the permits back, or release them, before that.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Update, literal, select

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, execute_in_session
from sqlalchemy_locks.core.typing import shaped
from sqlalchemy_locks.errors import LockLost, Unsupported
from sqlalchemy_locks.semaphore.base import SemaphoreBody, request_shared, token_of
from sqlalchemy_locks.semaphore.base import external_id as id_of
from sqlalchemy_locks.semaphore.statements import RELEASED
from sqlalchemy_locks.values import Grant


class Guarded(SemaphoreBody):
    def __init__(self, statement: Update) -> None:
        super().__init__()
        self.name = "guarded"
        self.given = statement
        self.mapper = statement.table._annotations.get("parententity")

    def because(self, context: BuildContext) -> str:
        return "since the permits are looked at, and locked, before the write"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return False

    def run(self, execution: Execution) -> bool:
        # not by_statements of the base, as the wait is for the look only: the write is the app's own
        called, token = execution.values["external_id"], execution.values["token"]
        with execution.waiting():
            if execution.backend.locking == "file":
                self._take_file(execution)
            request = request_shared(execution, self.statements(execution))
        if request is None or request.state == RELEASED or request.expired or token not in (None, request.token):
            raise LockLost(
                f"the permits of the request {called!r} are held no longer, so the write was not made: "
                f"{'there is no such request' if request is None else 'they were released, or their time ran out'}"
            )
        return self._write(execution)

    def _write(self, execution: Execution) -> bool:
        if execution.session is not None and self.mapper is not None:
            result: Any = execute_in_session(execution, self.given, {})
        else:
            result = execution.connection.execute(self.given, execution_options=execution.options)
        return bool(result.rowcount)

    def route(self) -> dict[str, Any]:
        return {"clause": self.given} if self.mapper is None else {"mapper": self.mapper, "clause": self.given}


@shaped(select(literal(True)))
def guarded(statement: Update, grant: Grant | str) -> Operation[Any]:
    """Run an UPDATE only while permits are held, and keep them from being taken until its transaction ends.

    :param statement: an UPDATE of the same database, of a table or a mapped class, without RETURNING.
    :param grant: what ``acquire`` gave, or the external id it was acquired with: where ids are reclaimed, the grant,
        never the id, which is the new one's by then.
    :return: ``True`` when it was written, ``False`` when no row matches the statement's own condition.
    :raises LockLost: when the permits were released, taken back or swept, or their time ran out; nothing is written.
    :raises LockTimeout: when the release of this request, under way elsewhere, took longer than the database, or the
        option ``locks_wait`` (seconds), lets one wait.

    Unlike a fencing token it serves any capacity, and needs no column. Until its transaction ends, ``renew`` and
    ``release`` of this request wait: commit soon.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, ttl=60))
    >>> session.scalar(sl.guarded(update(Document).where(Document.id == 1).values(body=text), grant))
    """
    if not isinstance(statement, Update):
        raise TypeError(f"guarded takes an UPDATE, not {statement!r}")
    if statement._returning:
        raise Unsupported("guarded answers True or False: leave RETURNING out of its statement, and read afterwards")
    if isinstance(grant, Grant) and not grant.acquired:
        raise LockLost(f"the request {grant.external_id!r} was not granted: there is nothing to write under")
    values = {"external_id": id_of(grant), "token": token_of(grant)}
    return Operation(Guarded(statement), values)

"""release: free the permits of a request. It locks only the request and its permits, so it waits for no acquire."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, Text, literal, select
from sqlalchemy.exc import IntegrityError

from sqlalchemy_locks.core.operation import Execution, Operation
from sqlalchemy_locks.core.typing import shaped
from sqlalchemy_locks.semaphore import base
from sqlalchemy_locks.semaphore.statements import RELEASED, Statements
from sqlalchemy_locks.sql.elements import WAIT_MS, LockFunction
from sqlalchemy_locks.values import Grant, Released


class EndRequest(base.SemaphoreImpl):
    """Release a request.

    :param deletes: delete the request, whose work has failed, so that its id can be granted again.
    :param withdraws: the acquire may still be under way: if it arrives later, it is not granted.
    """

    def __init__(self, name: str, *, deletes: bool = False, withdraws: bool = False) -> None:
        super().__init__()
        self.name, self.deletes, self.withdraws = name, deletes, withdraws

    def call(self) -> LockFunction | None:
        several = self.deletes or self.withdraws
        return None if several else LockFunction("semaphore_release", *base.IDENTITY, WAIT_MS, type_=Text())

    def answer(self, execution: Execution, row: Row[Any]) -> Released:
        return Released(row[0])

    def run_statements(self, execution: Execution, sql: Statements) -> Released:
        if self.withdraws:
            self._insert_ended(execution, sql)
        request = base.lock_own_request(execution, sql)
        if request is None:
            return Released.UNKNOWN
        if self.deletes:
            base.delete_request(execution, sql, request.id)
        elif request.state != RELEASED:
            base.end_request(execution, sql, request.id)
        return Released.ALREADY_RELEASED if request.state == RELEASED else Released.RELEASED

    def _insert_ended(self, execution: Execution, sql: Statements) -> None:
        """Insert a released request unless its id exists; the INSERT waits for an acquire that is under way."""
        values = {name: execution.values[name] for name in ("external_id", "token")}
        row = {**values, "owner": None, "ttl_seconds": None, "state": RELEASED}
        try:
            execution.execute(sql.insert_absent_request, row)
        except IntegrityError as error:
            if execution.backend.meaning(error) != "duplicate":
                raise


_RELEASE = EndRequest("semaphore.release")
_WITHDRAW = EndRequest("semaphore.withdraw", withdraws=True)
_ABANDON = EndRequest("semaphore.abandon", deletes=True)
_FORGET = EndRequest("semaphore.forget", deletes=True, withdraws=True)


@shaped(select(literal(Released.RELEASED)))
def release(external_id: str | Grant) -> Operation[Any]:
    """Release the permits of a request.

    :param external_id: the id that they were acquired with, or the grant itself. A grant identifies its own request
        only, never a later one with the same id (made after a clean-up, or by another block); a denied grant matches
        no request. For an id that blocks use, give the grant.
    :return: a :class:`~sqlalchemy_locks.Released`: ``RELEASED``; ``ALREADY_RELEASED`` when it was released or swept
        before; ``UNKNOWN`` when there is no such request. Each of them is a ``str``.
    :raises LockTimeout: when a ``guarded`` write kept it locked for longer than the wait that the database, or the
        option ``locks_wait`` (seconds), allows; it can be released again.

    It locks its own request and permits only, so it waits for no acquire. It waits for the transaction of a ``guarded``
    write of its own request. A second release changes nothing, however late it comes. In REPEATABLE READ on PostgreSQL,
    a request that was made after the transaction's snapshot is ``UNKNOWN``.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, external_id="job-1"))
    >>> session.scalar(sl.semaphore.release("job-1"))
    <Released.RELEASED: 'RELEASED'>
    """
    return Operation(_RELEASE, base.identity_of(external_id))


def abandon(grant: Grant) -> Operation[Any]:
    """Return the release at the end of a block that raised an error; the request's id can then be granted again."""
    return Operation(_ABANDON, base.identity_of(grant))


def withdraw(external_id: str) -> Operation[Any]:
    """Return the release of a request whose caller was cancelled before the answer came."""
    return Operation(_WITHDRAW, base.identity_of(external_id))


def forget(external_id: str, token: str) -> Operation[Any]:
    """Return the deletion of a request whose caller was cancelled before the answer came.

    :param token: the token of the caller's request; a request of another caller stays.
    """
    return Operation(_FORGET, {**base.identity_of(external_id), "token": token})

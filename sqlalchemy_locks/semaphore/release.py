"""release and renew: a request and its own permits, and nothing else, so neither waits for an acquire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Boolean, Row, Text, bindparam, literal, select
from sqlalchemy.exc import IntegrityError

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.typing import BOOL_ROW, shaped
from sqlalchemy_locks.semaphore.base import SemaphoreImpl, delete_request, identity_of, lock_request
from sqlalchemy_locks.semaphore.permit_sums import end_request
from sqlalchemy_locks.semaphore.statements import RELEASED, Statements
from sqlalchemy_locks.sql.elements import WAIT_MS, LockFunction
from sqlalchemy_locks.values import Grant, Released

_ARGUMENTS = (bindparam("external_id", type_=Text()), bindparam("token", type_=Text()), WAIT_MS)


def _lock_own_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row and return it; ``None`` without one, or when it is a later one of the same id."""
    row = lock_request(execution, sql)
    return row if row is not None and execution.values["token"] in (None, row.token) else None


class EndRequest(SemaphoreImpl):
    """Releases a request.

    :param deletes: its work has failed: it is deleted, so that its id can be granted again.
    :param withdraws: it may still be under way: one that arrives later is not granted.
    """

    def __init__(self, name: str, *, deletes: bool = False, withdraws: bool = False) -> None:
        super().__init__()
        self.name, self.deletes, self.withdraws = name, deletes, withdraws

    def call(self) -> LockFunction | None:
        several = self.deletes or self.withdraws
        return None if several else LockFunction("semaphore_release", *_ARGUMENTS, type_=Text())

    def answer(self, execution: Execution, row: Row[Any]) -> Released:
        return Released(row[0])

    def run_statements(self, execution: Execution, sql: Statements) -> Released:
        if self.withdraws:
            self._insert_ended(execution, sql)
        request = _lock_own_request(execution, sql)
        if request is None:
            return Released.UNKNOWN
        if self.deletes:
            delete_request(execution, sql, request.id)
        elif request.state != RELEASED:
            end_request(execution, sql, request.id)
        return Released.ALREADY_RELEASED if request.state == RELEASED else Released.RELEASED

    def _insert_ended(self, execution: Execution, sql: Statements) -> None:
        """Insert a request that has ended, unless there is one of this id: it waits for one that is under way."""
        values = {name: execution.values[name] for name in ("external_id", "token")}
        ended = {**values, "owner": None, "ttl_seconds": None, "state": RELEASED}
        try:
            execution.execute(sql.insert_absent_request, ended)
        except IntegrityError as error:
            if execution.backend.meaning(error) != "duplicate":
                raise


class RenewRequest(SemaphoreImpl):
    name = "semaphore.renew"

    def call(self) -> LockFunction:
        return LockFunction("semaphore_renew", *_ARGUMENTS, type_=Boolean())

    def answer(self, execution: Execution, row: Row[Any]) -> bool:
        return bool(row[0])

    def run_statements(self, execution: Execution, sql: Statements) -> bool:
        # locked first: a clock that is read before a wait is slow by the wait
        request = _lock_own_request(execution, sql)
        return request is not None and execution.execute(sql.renew_request, {"row_id": request.id}).rowcount == 1


class RenewBatch(SemaphoreImpl):
    """Renews many requests at once; passes over what others have locked, so that one row holds up no other."""

    name = "semaphore.renew_batch"

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "since the rows are locked, where no other has locked them, before they are renewed"

    def run_statements(self, execution: Execution, sql: Statements) -> frozenset[str]:
        names = {name: execution.values[name] for name in ("external_ids", "tokens")}
        requests: dict[int, str] = {row.id: row.token for row in execution.execute(sql.read_tokens, names)}
        if not requests:
            return frozenset()
        # what is held while it is locked stays held: only its lock's holder could end it, although its time runs out
        held = execution.execute(sql.lock_held, {"row_ids": sorted(requests)}).scalars().all()
        if held:
            execution.execute(sql.renew_requests, {"row_ids": held})
        return frozenset(requests[row] for row in held)


_RELEASE, _RENEW, _RENEW_BATCH = EndRequest("semaphore.release"), RenewRequest(), RenewBatch()
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

    It locks its own request and permits only, and waits for no acquire; for a ``guarded`` write of its own request
    it waits until that has committed. A second release changes nothing, however late it comes. In REPEATABLE READ on
    PostgreSQL, a request that was made after the transaction's snapshot is unknown to it.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, external_id="job-1"))
    >>> session.scalar(sl.semaphore.release("job-1"))
    <Released.RELEASED: 'RELEASED'>
    """
    return Operation(_RELEASE, identity_of(external_id))


def abandon(grant: Grant) -> Operation[Any]:
    """Return the release at the end of a block that raised, whose id can then be granted again."""
    return Operation(_ABANDON, identity_of(grant))


def withdraw(external_id: str) -> Operation[Any]:
    """Return the release of a request whose caller was cancelled before the answer came."""
    return Operation(_WITHDRAW, identity_of(external_id))


def forget(external_id: str, token: str) -> Operation[Any]:
    """Delete the request of a caller that was cancelled before the answer came, and none of another caller's.

    :param token: what that caller's request has.
    """
    return Operation(_FORGET, {**identity_of(external_id), "token": token})


@shaped(BOOL_ROW)
def renew(external_id: str | Grant) -> Operation[Any]:
    """Restart the time to live of a request.

    :param external_id: the id that it was acquired with, or the grant itself, which identifies its own request only:
        for an id that blocks use, give the grant.
    :return: ``True`` when it is held; ``False`` once its time ran out (swept or not), when it was released, or unknown.
    :raises LockTimeout: as :func:`release`.

    Waits while a ``guarded`` write of this request is not committed; when its time runs out meanwhile it is ``False``.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, ttl=60))
    >>> session.scalar(sl.semaphore.renew(grant))
    True
    """
    return Operation(_RENEW, identity_of(external_id))


def renew_batch(grants: Iterable[Grant]) -> Operation[Any]:
    """Restart the time to live of grants; the value is the tokens of those that were renewed.

    Not their ids, which a request that is lost may share with a later one.

    One that isn't among them is locked by others, or held no longer: only :func:`renew` can tell. For a transaction of
    its own at READ COMMITTED.
    """
    grants = list(grants)
    values = {"external_ids": [grant.external_id for grant in grants], "tokens": [grant.token for grant in grants]}
    return Operation(_RENEW_BATCH, values)

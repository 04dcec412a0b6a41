"""release and renew: a request and its own permits, and nothing else, so neither waits for an acquire."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Row, Text, bindparam, literal, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.typing import BOOL_ROW, shaped
from sqlalchemy_locks.semaphore.base import (
    WAIT,
    SemaphoreImpl,
    delete_request,
    end_request,
    external_id_of,
    lock_request,
    token_of,
)
from sqlalchemy_locks.semaphore.statements import RELEASED, Statements
from sqlalchemy_locks.sql.elements import LockFunction
from sqlalchemy_locks.values import Grant, Released

_ARGUMENTS = (bindparam("external_id", type_=Text()), bindparam("token", type_=Text()), WAIT)


def _lock_own_request(execution: Execution, sql: Statements) -> Row[Any] | None:
    """Lock the request's row and return it; ``None`` without one, or when it is a later one of the same id."""
    row = lock_request(execution, sql)
    return row if row is not None and execution.values["token"] in (None, row.token) else None


class ReleasePermits(SemaphoreImpl):
    name = "semaphore.release"

    def call(self) -> LockFunction:
        return LockFunction("semaphore_release", *_ARGUMENTS, type_=Text())

    def answer(self, execution: Execution, row: Row[Any]) -> Released:
        return Released(row[0])

    def run_statements(self, execution: Execution, sql: Statements) -> Released:
        request = _lock_own_request(execution, sql)
        if request is None:
            return Released.UNKNOWN
        if request.state == RELEASED:
            return Released.ALREADY_RELEASED
        end_request(execution, sql, request.id)
        return Released.RELEASED


def _insert_ended(execution: Execution, sql: Statements) -> None:
    """Insert a request that has ended, unless there is one of this id: it waits for one that is under way."""
    values = {name: execution.values[name] for name in ("external_id", "token")}
    try:
        execution.execute(sql.insert_absent_request, {**values, "owner": None, "ttl_seconds": None, "state": RELEASED})
    except IntegrityError as error:
        if execution.backend.meaning(error) != "duplicate":
            raise


class WithdrawRequest(ReleasePermits):
    """Ends a request that may still be under way: it waits for that one, and one that arrives later is not granted."""

    name = "semaphore.withdraw"

    def build(self, context: BuildContext) -> Executable | None:
        return None

    def run_statements(self, execution: Execution, sql: Statements) -> Released:
        _insert_ended(execution, sql)
        return super().run_statements(execution, sql)


class AbandonRequest(ReleasePermits):
    """Deletes a request whose work has failed, so that its id can be granted again."""

    name = "semaphore.abandon"

    def build(self, context: BuildContext) -> Executable | None:
        return None

    def run_statements(self, execution: Execution, sql: Statements) -> Released:
        request = _lock_own_request(execution, sql)
        if request is None:
            return Released.UNKNOWN
        delete_request(execution, sql, request.id)
        return Released.RELEASED if request.state != RELEASED else Released.ALREADY_RELEASED


class ForgetRequest(AbandonRequest):
    """Deletes a request that may still be under way, so that its id can be granted again."""

    name = "semaphore.forget"

    def run_statements(self, execution: Execution, sql: Statements) -> Released:
        _insert_ended(execution, sql)
        return super().run_statements(execution, sql)


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


_RELEASE, _RENEW = ReleasePermits(), RenewRequest()
_WITHDRAW, _ABANDON, _FORGET = WithdrawRequest(), AbandonRequest(), ForgetRequest()


def _values(request: str | Grant) -> dict[str, Any]:
    return {"external_id": external_id_of(request), "token": token_of(request)}


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
    return Operation(_RELEASE, _values(external_id))


def abandon(grant: Grant) -> Operation[Any]:
    """Return the release at the end of a block that raised, whose id can then be granted again."""
    return Operation(_ABANDON, _values(grant))


def withdraw(external_id: str) -> Operation[Any]:
    """Return the release of a request whose caller was cancelled before the answer came."""
    return Operation(_WITHDRAW, _values(external_id))


def forget(external_id: str, token: str) -> Operation[Any]:
    """Delete the request of a caller that was cancelled before the answer came, and none of another caller's.

    :param token: what that caller's request has.
    """
    return Operation(_FORGET, {**_values(external_id), "token": token})


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
    return Operation(_RENEW, _values(external_id))

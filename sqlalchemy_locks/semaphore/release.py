"""release and renew: a request and its own permits, and nothing else, so neither waits for who acquires."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Text, bindparam, literal, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.typing import shaped
from sqlalchemy_locks.semaphore.base import LOCK_WAIT, SemaphoreBody, end, request_locked, token_of
from sqlalchemy_locks.semaphore.base import external_id as id_of
from sqlalchemy_locks.semaphore.statements import RELEASED
from sqlalchemy_locks.sql.elements import LockFunction
from sqlalchemy_locks.values import Grant, Released

_ARGUMENTS = (
    bindparam("external_id", type_=Text()),
    bindparam("token", type_=Text()),
    LOCK_WAIT,
)


class _OfRequest(SemaphoreBody):
    def locked(self, execution: Execution, made: Any) -> Any:
        """The request's row, locked; ``None`` without one, or when it is another's who has had the id since."""
        row = request_locked(execution, made)
        return row if row is not None and execution.values["token"] in (None, row.token) else None


class ReleasePermits(_OfRequest):
    def call(self) -> LockFunction:
        return LockFunction("semaphore_release", *_ARGUMENTS, type_=Text())

    def answer(self, execution: Execution, row: Any) -> Released:
        return Released(row[0])

    def by_statements(self, execution: Execution, made: Any) -> Released:
        request = self.locked(execution, made)
        if request is None:
            return Released.UNKNOWN
        if request.state == RELEASED:
            return Released.ALREADY_RELEASED
        end(execution, made, request.id)
        return Released.RELEASED


class ReleaseOnce(ReleasePermits):
    """As ``ReleasePermits``, for who must know whether it was held until now: it isn't sent twice."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "semaphore.release"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return False


class Withdraw(ReleasePermits):
    """Ends a request that may still be on its way: it waits for it, and one that arrives later is not granted."""

    def build(self, context: BuildContext) -> Executable | None:
        return None

    def by_statements(self, execution: Execution, made: Any) -> Released:
        row = {
            "external_id": execution.values["external_id"],
            "owner": None,
            "ttl_seconds": None,
            "state": RELEASED,
            "token": None,
        }
        try:
            execution.execute(made.withdraw, row)
        except IntegrityError as error:
            if not execution.backend.duplicate(error):
                raise
        return super().by_statements(execution, made)


class Renew(_OfRequest):
    def call(self) -> LockFunction:
        return LockFunction("semaphore_renew", *_ARGUMENTS, type_=Boolean())

    def answer(self, execution: Execution, row: Any) -> bool:
        return bool(row[0])

    def by_statements(self, execution: Execution, made: Any) -> bool:
        # locked first: a clock that is read before a wait is slow by the wait
        request = self.locked(execution, made)
        return request is not None and execution.execute(made.renew, {"which": request.id}).rowcount == 1


_RELEASE, _RELEASE_ONCE, _WITHDRAW, _RENEW = ReleasePermits(), ReleaseOnce(), Withdraw(), Renew()


def _of(given: str | Grant) -> dict[str, Any]:
    # lock_wait for whoever has it compiled: each run gives its own
    return {"external_id": id_of(given), "token": token_of(given), "lock_wait": None}


@shaped(select(literal(Released.RELEASED)))
def release(external_id: str | Grant) -> Operation[Any]:
    """Give the permits of a request back.

    :param external_id: the id that they were acquired with, or the grant itself, which stands for its own request
        only: not for a later one, made with the same id after a clean-up, or by a block that reclaimed it, and a denial
        for none. Where ids are reclaimed, give the grant, never the id.
    :return: a :class:`~sqlalchemy_locks.Released`: ``RELEASED``; ``ALREADY_RELEASED`` when it was before, or was taken
        back or swept; ``UNKNOWN`` when there is no such request. Each of them is a ``str``.
    :raises LockTimeout: when a ``guarded`` write kept it locked for longer than the database, or the option
        ``locks_wait`` (seconds), lets one wait; it can be released again.

    It touches its own request and permits only, and waits for no acquirer; for a ``guarded`` write of its own request
    it waits until that has committed. A second release changes nothing, however late it comes. In REPEATABLE READ on
    PostgreSQL, a request that was made after the transaction's snapshot is unknown to it.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, external_id="job-1"))
    >>> session.scalar(sl.semaphore.release("job-1"))
    <Released.RELEASED: 'RELEASED'>
    """
    return Operation(_RELEASE, _of(external_id))


def release_once(grant: Grant) -> Operation[Any]:
    """The release at the end of a block; a lost reply is ``OutcomeUnknown``."""
    return Operation(_RELEASE_ONCE, _of(grant))


def withdraw(external_id: str) -> Operation[Any]:
    """The release of what was asked for by somebody who went away without an answer."""
    return Operation(_WITHDRAW, _of(external_id))


@shaped(select(literal(True)))
def renew(external_id: str | Grant) -> Operation[Any]:
    """Have the time of a request count from now.

    :param external_id: the id that it was acquired with, or the grant itself, which stands for its own request only:
        where ids are reclaimed, give the grant, never the id.
    :return: ``True`` when it is held; ``False`` once its time ran out (swept or not), when it was released, or unknown.
    :raises LockTimeout: as :func:`release`.

    Waits while a ``guarded`` write of this request is not committed; when its time runs out meanwhile it is ``False``.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, ttl=60))
    >>> session.scalar(sl.semaphore.renew(grant))
    True
    """
    return Operation(_RENEW, _of(external_id))

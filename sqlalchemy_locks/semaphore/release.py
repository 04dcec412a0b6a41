"""release and renew: a request and its own permits, and nothing else, so neither waits for who acquires."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Text, bindparam, literal, select

from ..elements import LockFunction
from ..operation import Operation, Run, shaped
from ..values import Grant, Released
from .base import SemaphoreBody, end
from .base import external_id as id_of
from .statements import RELEASED

_ID = bindparam("external_id", type_=Text())


class Release(SemaphoreBody):
    def call(self) -> LockFunction:
        return LockFunction("semaphore_release", _ID, type_=Text())

    def answer(self, run: Run, row: Any) -> Released:
        return Released(row[0])

    def by_statements(self, run: Run, made: Any) -> Released:
        request = run.execute(made.request_locked, {"called": run.values["external_id"]}).first()
        if request is None:
            return Released.UNKNOWN
        if request.state == RELEASED:
            return Released.ALREADY_RELEASED
        end(run, made, request.id)
        return Released.RELEASED


class Renew(SemaphoreBody):
    def call(self) -> LockFunction:
        return LockFunction("semaphore_renew", _ID, type_=Boolean())

    def answer(self, run: Run, row: Any) -> bool:
        return bool(row[0])

    def by_statements(self, run: Run, made: Any) -> bool:
        # locked first: a clock that is read before a wait is slow by the wait
        request = run.execute(made.request_locked, {"called": run.values["external_id"]}).first()
        return request is not None and run.execute(made.renew, {"which": request.id}).rowcount == 1


_RELEASE, _RENEW = Release(), Renew()


@shaped(select(literal(Released.RELEASED)))
def release(external_id: str | Grant) -> Operation[Any]:
    """Give the permits of a request back.

    :param external_id: the id that they were acquired with, or the grant itself.
    :return: a :class:`~sqlalchemy_locks.Released`: ``RELEASED``; ``ALREADY_RELEASED`` when it was before, or was taken
        back or swept; ``UNKNOWN`` when there is no such request. Each of them is a ``str``.

    It touches its own request and permits only, and waits for no acquirer; for a ``guarded`` write of its own request
    it waits until that has committed. A second release changes nothing, however late it comes. In REPEATABLE READ on
    PostgreSQL, a request that was made after the transaction's snapshot is unknown to it.

    >>> session.scalar(sl.semaphore.release("job-1"))
    <Released.RELEASED: 'RELEASED'>
    """
    return Operation(_RELEASE, {"external_id": id_of(external_id)})


@shaped(select(literal(True)))
def renew(external_id: str | Grant) -> Operation[Any]:
    """Have the time of a request count from now.

    :param external_id: the id that it was acquired with, or the grant itself.
    :return: ``True`` when it is held; ``False`` once its time ran out (swept or not), when it was released, or unknown.

    Waits while a ``guarded`` write of this request is not committed; when its time runs out meanwhile it is ``False``.
    """
    return Operation(_RENEW, {"external_id": id_of(external_id)})

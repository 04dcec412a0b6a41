"""renew: a request's time to live begins anew. It locks that request alone, so it waits for no acquire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Boolean

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.typing import BOOL_ROW, shaped
from sqlalchemy_locks.semaphore.base import IDENTITY, SemaphoreImpl, identity_of, lock_own_request
from sqlalchemy_locks.semaphore.statements import Statements
from sqlalchemy_locks.sql.elements import WAIT_MS, LockFunction
from sqlalchemy_locks.values import Grant


class RenewRequest(SemaphoreImpl):
    name = "semaphore.renew"

    def call(self) -> LockFunction:
        return LockFunction("semaphore_renew", *IDENTITY, WAIT_MS, type_=Boolean())

    def run_statements(self, execution: Execution, sql: Statements) -> bool:
        # locked first: a clock that is read before a wait is slow by the wait
        request = lock_own_request(execution, sql)
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


_RENEW, _RENEW_BATCH = RenewRequest(), RenewBatch()


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

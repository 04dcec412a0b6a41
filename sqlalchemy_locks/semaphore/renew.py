"""renew: restart a request's time to live. It locks only that request, so it waits for no acquire."""

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
        # lock first: a time that is read before the wait for the lock is outdated after it
        request = lock_own_request(execution, sql)
        return request is not None and execution.execute(sql.renew_request, {"row_id": request.id}).rowcount == 1


class RenewBatch(SemaphoreImpl):
    """Renews many requests at once, except those that others have locked, so that one locked row delays no other."""

    name = "semaphore.renew_batch"

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "since the rows are locked, where no other has locked them, before they are renewed"

    def run_statements(self, execution: Execution, sql: Statements) -> frozenset[str]:
        names = {name: execution.values[name] for name in ("external_ids", "tokens")}
        tokens: dict[int, str] = {row.id: row.token for row in execution.execute(sql.read_tokens, names)}
        if not tokens:
            return frozenset()
        # A request that is held when it is locked can be renewed even if its time runs out now: only the transaction
        # that has locked it could release it.
        held_ids = execution.execute(sql.lock_held, {"row_ids": sorted(tokens)}).scalars().all()
        if held_ids:
            execution.execute(sql.renew_requests, {"row_ids": held_ids})
        return frozenset(tokens[row_id] for row_id in held_ids)


_RENEW, _RENEW_BATCH = RenewRequest(), RenewBatch()


@shaped(BOOL_ROW)
def renew(external_id: str | Grant) -> Operation[Any]:
    """Restart the time to live of a request.

    :param external_id: the id that it was acquired with, or the grant itself, which identifies its own request only:
        for an id that blocks use, give the grant.
    :return: ``True`` if it is held; ``False`` if it has expired (swept or not), was released, or is unknown.
    :raises LockTimeout: as :func:`release`.

    It waits for the transaction of a ``guarded`` write of this request. If the request expires during the wait, the
    value is ``False``.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 1}, ttl=60))
    >>> session.scalar(sl.semaphore.renew(grant))
    True
    """
    return Operation(_RENEW, identity_of(external_id))


def renew_batch(grants: Iterable[Grant]) -> Operation[Any]:
    """Restart the time to live of grants; the value is the tokens of the renewed ones.

    It isn't their ids, since a lost request may have the same id as a later one. A grant whose token is missing is
    locked by another transaction, or no longer held: only :func:`renew` can tell. Run it in a transaction of its own at
    READ COMMITTED.
    """
    grants = list(grants)
    values = {"external_ids": [grant.external_id for grant in grants], "tokens": [grant.token for grant in grants]}
    return Operation(_RENEW_BATCH, values)

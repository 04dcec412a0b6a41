"""reclaim: an id whose request ran out of time is free again, for whoever asks first.

What nobody renewed in time is never held again, swept or not. So whoever finds that may forget the request: of those
who then ask with its id one is granted, as of those who ask with any new one, and the dead one's grant stands for a
request that isn't there.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, bindparam, case, select

from sqlalchemy_locks.core.operation import Execution, Operation
from sqlalchemy_locks.semaphore.base import SemaphoreBody, drop, request_locked
from sqlalchemy_locks.semaphore.base import external_id as id_of
from sqlalchemy_locks.semaphore.statements import RELEASED, until
from sqlalchemy_locks.sql.clock import Now


class Reclaim(SemaphoreBody):
    def by_statements(self, execution: Execution, made: Any) -> bool:
        # it waits for a write under its guard, after which the new request may begin
        request = request_locked(execution, made)
        if request is None:
            return True
        if execution.execute(_ran_out(execution), {"which": request.id}).scalar():
            drop(execution, made, request.id)
            return True
        # held: somebody has reclaimed it, and asked, since it was found to be over
        return bool(request.state != RELEASED)


def _ran_out(execution: Execution) -> Any:
    """Whether a locked request had no time left when it ended, or has none now; never, where it has no end."""
    request = execution.context.tables.permit_request
    ended: Any = case((request.c.state == RELEASED, request.c.updated_at), else_=Now())
    return select(until(request) <= ended).where(request.c.id == bindparam("which", type_=BigInteger()))


_RECLAIM = Reclaim()


def reclaim(external_id: str) -> Operation[Any]:
    """Forget the request of an id, if its time ran out before it was released.

    ``True`` when the id is to be asked for again: it is free, or somebody's who was faster.
    """
    return Operation(_RECLAIM, {"external_id": id_of(external_id)})

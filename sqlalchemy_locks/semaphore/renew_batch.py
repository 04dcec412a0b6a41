"""renew_batch: many grants at once. What others have locked is passed over, so that one row holds up no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, String, Update, bindparam, or_, select, update
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.semaphore.base import SemaphoreImpl
from sqlalchemy_locks.semaphore.statements import RELEASED, expiry
from sqlalchemy_locks.sql.clock import Now
from sqlalchemy_locks.sql.tables import Tables
from sqlalchemy_locks.values import Grant


@dataclass(frozen=True)
class _Statements:
    select_requests: Executable
    lock_held: Executable
    restart: Update


@cache
def _statements(tables: Tables) -> _Statements:
    request = tables.permit_request
    chosen = request.c.id.in_(bindparam("ids", expanding=True, type_=BigInteger()))
    lasting = or_(request.c.ttl_seconds.is_(None), expiry(request) > Now())
    return _Statements(
        select_requests=select(request.c.id, request.c.token).where(
            request.c.external_id.in_(bindparam("external_ids", expanding=True, type_=String())),
            request.c.token.in_(bindparam("tokens", expanding=True, type_=String())),
        ),
        # by the primary key, so that InnoDB locks these rows and no others
        lock_held=select(request.c.id)
        .where(chosen, request.c.state != RELEASED, lasting)
        .order_by(request.c.id)
        .with_for_update(skip_locked=True, key_share=True),
        restart=update(request).where(chosen).values(renewed_at=Now()),
    )


class RenewBatch(SemaphoreImpl):
    name = "semaphore.renew_batch"

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "since the rows are locked, where no other has locked them, before they are renewed"

    def run_statements(self, execution: Execution, sql: Any) -> frozenset[str]:
        statements = _statements(execution.context.tables)
        names = {name: execution.values[name] for name in ("external_ids", "tokens")}
        rows = execution.execute(statements.select_requests, names)
        requests: dict[int, str] = {row.id: row.token for row in rows}
        if not requests:
            return frozenset()
        # what is held while it is locked stays held: only its lock's holder could end it, although its time runs out
        held = execution.execute(statements.lock_held, {"ids": sorted(requests)}).scalars().all()
        if held:
            execution.execute(statements.restart, {"ids": held})
        return frozenset(requests[row] for row in held)


_RENEW_BATCH = RenewBatch()


def renew_batch(grants: Iterable[Grant]) -> Operation[Any]:
    """Restart the time to live of grants; the value is the tokens of those that were renewed.

    Not their ids, which a request that is lost may share with a later one.

    One that isn't among them is locked by others, or held no longer: only :func:`renew` can tell. For a transaction of
    its own at READ COMMITTED.
    """
    grants = list(grants)
    values = {"external_ids": [grant.external_id for grant in grants], "tokens": [grant.token for grant in grants]}
    return Operation(_RENEW_BATCH, values)

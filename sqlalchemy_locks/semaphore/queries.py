"""usage, holders, history: what a semaphore's tables tell, as one SELECT on every engine."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Integer, String, and_, bindparam, cast, func, literal, select, type_coerce
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import positive_int, valid_name
from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl, RowsOperation
from sqlalchemy_locks.semaphore.statements import HELD_STATE, until
from sqlalchemy_locks.sql.clock import UTC, Now
from sqlalchemy_locks.sql.tables import Tables

_NAME = bindparam("name", type_=String())


class Read(OperationImpl):
    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.name = f"semaphore.{type(self).__name__.lower()}"

    def build(self, context: BuildContext) -> Executable | None:
        return self.select(context.tables)

    def select(self, tables: Tables) -> Executable:
        raise NotImplementedError

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        assert statement is not None
        return execution.execute(statement)


class Usage(Read):
    def select(self, tables: Tables) -> Executable:
        sem, req, per = tables.semaphore, tables.permit_request, tables.permit
        held = and_(per.c.semaphore_id == sem.c.id, per.c.state == HELD_STATE)
        used = select(cast(func.coalesce(func.sum(per.c.count), 0), BigInteger())).where(held).scalar_subquery()
        holders = select(func.count()).where(held).scalar_subquery()
        oldest = select(func.min(per.c.permit_request_id)).where(held).scalar_subquery()
        return (
            select(
                sem.c.name,
                sem.c.capacity,
                used.label("used"),
                req.c.external_id.label("oldest_holder"),
                req.c.owner.label("oldest_owner"),
                type_coerce(req.c.created_at, UTC()).label("oldest_since"),
                holders.label("holders"),
            )
            .select_from(sem.outerjoin(req, req.c.id == oldest))
            .where(sem.c.capacity.is_not(None))
            .order_by(sem.c.name)
        )


class Holders(Read):
    def select(self, tables: Tables) -> Executable:
        sem, req, per = tables.semaphore, tables.permit_request, tables.permit
        joined = per.join(sem, sem.c.id == per.c.semaphore_id).join(req, req.c.id == per.c.permit_request_id)
        return (
            select(
                req.c.external_id,
                req.c.owner,
                per.c.count.label("permits"),
                per.c.fence,
                type_coerce(req.c.created_at, UTC()).label("since"),
                type_coerce(until(req), UTC()).label("expires_at"),
                func.coalesce(until(req) <= Now(), literal(False)).label("expired"),
            )
            .select_from(joined)
            .where(sem.c.name == _NAME, per.c.state == HELD_STATE)
            .order_by(per.c.fence)
        )


class History(Read):
    def select(self, tables: Tables) -> Executable:
        sem, his = tables.semaphore, tables.semaphore_history
        at = type_coerce(his.c.changed_at, UTC()).label("changed_at")
        # in the order of an index, whether it is of one semaphore or of all, so that no more is read than is given: no
        # join, which MariaDB would begin with the semaphores, and sort
        called = select(sem.c.name).where(sem.c.id == his.c.semaphore_id).scalar_subquery()
        changes = (
            select(called.label("name"), his.c.old_capacity, his.c.new_capacity, his.c.changed_by, at)
            .order_by(his.c.id.desc())
            .limit(bindparam("limit", type_=Integer()))
        )
        narrowed: Executable = self.narrowed(changes, sem, his)
        return narrowed

    def narrowed(self, changes: Any, sem: Any, his: Any) -> Any:
        return changes


class HistoryOf(History):
    def __init__(self) -> None:
        super().__init__()
        self.name = "semaphore.history"

    def narrowed(self, changes: Any, sem: Any, his: Any) -> Any:
        of = select(sem.c.id).where(sem.c.name == _NAME).correlate(None).scalar_subquery()
        return changes.where(his.c.semaphore_id == of)


_USAGE, _HOLDERS, _HISTORY, _HISTORY_OF = Usage(), Holders(), History(), HistoryOf()


def usage() -> RowsOperation[Any]:
    """Every semaphore: ``name``, ``capacity``, ``used``, of who has held it longest ``oldest_holder`` (the external
    id), ``oldest_owner``, ``oldest_since`` (UTC, by the server's clock), or ``None``, and how many ``holders`` it has.

    What has expired is counted until it is taken back.

    >>> session.execute(sl.semaphore.usage()).all()
    """
    return RowsOperation(_USAGE, {})


def holders(name: str) -> RowsOperation[Any]:
    """Who holds permits of a semaphore: ``external_id``, ``owner``, ``permits``, ``fence``, ``since``, ``expires_at``,
    ``expired`` (its time ran out, and nobody has taken it back yet), in the order of their grants.

    >>> session.execute(sl.semaphore.holders("network")).all()
    []
    """
    return RowsOperation(_HOLDERS, {"name": valid_name(name, "a semaphore's name")})


def history(name: str | None = None, *, limit: int = 100) -> RowsOperation[Any]:
    """The last changes of capacity, newest first: ``name``, ``old_capacity``, ``new_capacity``, ``changed_by``,
    ``changed_at``.

    ``old_capacity`` is ``None`` where the semaphore was made, ``new_capacity`` where it was deleted. That a lease made
    one on its first use is not recorded.

    :param name: of one semaphore; without it, of all.
    :param limit: how many at most, at least 1; no more than these are read.

    >>> changes = session.execute(sl.semaphore.history("network", limit=10)).all()
    """
    most = positive_int(limit, "limit")
    if name is None:
        return RowsOperation(_HISTORY, {"limit": most})
    return RowsOperation(_HISTORY_OF, {"name": valid_name(name, "a semaphore's name"), "limit": most})

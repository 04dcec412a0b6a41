"""Mutex: held until it is released.

An acquisition is ``UPDATE task_state SET acquired = true WHERE id = ... AND acquired != true``. It changes the row for
exactly one of concurrent callers. A mutex has no expiry: after a failed run the next one must not start. If a dead
holder must not block the next one, use a lease of a semaphore.

Guarantee: between two releases exactly one acquisition returns ``True``, at any isolation level. Assumed: the row
exists (``create``), and the flag is changed only through a mutex of this row.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any, Literal

from sqlalchemy import (
    Boolean,
    DateTime,
    Integer,
    Result,
    Select,
    String,
    Update,
    and_,
    bindparam,
    false,
    literal,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.conditional.listing import Listing, labelled
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.conditional_update import ConditionalAcquire, ConditionalUpdate
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, RowsOperation
from sqlalchemy_locks.core.roles import (
    ID,
    ID_PARAM,
    OWNER_PARAM,
    QUEUE_PARAM,
    RoleColumns,
    RoleMapping,
    param_name,
    role_param,
)
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, shaped, shaped_rows
from sqlalchemy_locks.errors import OutcomeUnknown
from sqlalchemy_locks.sql.clock import NowAfterWait
from sqlalchemy_locks.sql.elements import force_index, skip_locked

_LIMIT = bindparam(param_name("limit"), type_=Integer())
_ROLES = ("queue", "id", "acquired", "owner", "token", "fence", "acquired_at", "retries")


class Mutex:
    """A lock that is held until it is released, as a flag of a row.

    :param entity: a mapped class or ``Table`` of your own; without one, the shipped table ``lock.task_state``.
    :param id: its column that names the mutex; its values must be unique (in one ``queue``).
    :param acquired: its flag, boolean or integer. ``NULL`` is free.
    :param queue: its column for queues; ids are then unique per queue, and each call takes ``queue=``.
    :param retries: its column for the number of acquisitions left; ``NULL`` is unlimited.
    :param owner: its column for the last holder's name. :param acquired_at: and for the time of the acquisition, by the
        server's clock.
    :param fence: its column for the fencing token, which each acquisition increments (:class:`Fence` makes one).
    :param token: its column, a string of at least 32 characters or a UUID, for a nonce by which ``Locks`` recognizes
        its own acquisition after a lost reply; without it, such an acquisition raises ``OutcomeUnknown``.
    :raises TypeError: :raises ValueError: for anything but a column of the class's own table.

    >>> mutex = sl.Mutex()
    >>> session.scalar(mutex.create("task_a"))
    >>> session.scalar(mutex.acquire("task_a"))
    True
    """

    def __init__(
        self,
        entity: Any = None,
        *,
        id: Any = None,
        acquired: Any = None,
        queue: Any = None,
        retries: Any = None,
        owner: Any = None,
        acquired_at: Any = None,
        fence: Any = None,
        token: Any = None,
    ) -> None:
        columns = {
            "queue": queue,
            "id": id,
            "acquired": acquired,
            "owner": owner,
            "token": token,
            "fence": fence,
            "acquired_at": acquired_at,
            "retries": retries,
        }
        if entity is None and not any(column is not None for column in columns.values()):
            self._mapping, self._impls = _shipped()
            return
        if entity is not None and (id is None or acquired is None):
            raise TypeError("Mutex needs id= and acquired=, columns of the given class or table")
        self._mapping = RoleMapping("Mutex", lambda tables: tables.task_state, _ROLES, entity, columns)
        self._mapping.require_type("acquired", (Boolean, Integer), "a flag")
        self._mapping.require_type("owner", (String,), "a name")
        self._mapping.require_type("acquired_at", (DateTime,), "an instant")
        self._impls = _MutexImpls(self._mapping)

    @shaped(INT_ROW)
    def create(self, *ids: Any, queue: Any = None, retries: int | None = None) -> Operation[Any]:
        """Create mutexes, released. Ids that exist are left unchanged.

        :param retries: how many acquisitions each allows; ``None``: the column's default (the shipped table:
            unlimited).
        :return: how many were created.

        >>> session.scalar(sl.Mutex().create("task_a", retries=3))
        1
        """
        values = row_admin.ids(self._mapping, "mutex.create", ids, queue) | row_admin.retries(self._mapping, retries)
        return Operation(self._impls.create[retries is not None], values)

    @shaped(BOOL_ROW)
    def acquire(self, id: Any, *, queue: Any = None, owner: str | None = None, nowait: bool = False) -> Operation[Any]:
        """Acquire a mutex if it is free and has a retry left.

        :param owner: the holder's name, stored for :meth:`release` and :meth:`held`.
        :param nowait: return ``False`` if another transaction has locked the row. Otherwise wait for that transaction
            to end, for at most the ``locks_wait`` option's seconds.
        :return: ``True`` if it was acquired, ``False`` if it is held or has no retry left.
        :raises UnknownTask: if it was never created.

        >>> session.scalar(sl.Mutex().acquire("task_b")), session.scalar(sl.Mutex().acquire("task_b"))
        (True, False)
        """
        values = self._mapping.with_owner(self._mapping.identity(id, queue), owner)
        return Operation(self._impls.acquire[bool(nowait)], values)

    @shaped(INT_ROW)
    def acquire_token(
        self, id: Any, *, queue: Any = None, owner: str | None = None, nowait: bool = False
    ) -> Operation[Any]:
        """Acquire a mutex as :meth:`acquire` does, and return a fencing token.

        :return: a number greater than any earlier token of this mutex, or ``None`` if it was not acquired.

        >>> session.scalar(sl.Mutex().acquire_token("task_b"))
        1
        """
        self._mapping.require("fence", "a fencing token")
        values = self._mapping.with_owner(self._mapping.identity(id, queue), owner)
        return Operation(self._impls.acquire_token[bool(nowait)], values)

    @shaped(BOOL_ROW)
    def release(self, id: Any, *, queue: Any = None, owner: str | None = None) -> Operation[Any]:
        """Release a mutex.

        :param owner: release it only if this owner acquired it.
        :return: ``True`` if it was held (by that owner) and is free now.
        :raises UnknownTask: if it was never created.

        >>> session.scalar(sl.Mutex().acquire("task_b")), session.scalar(sl.Mutex().release("task_b"))
        (True, True)
        """
        values = self._mapping.identity(id, queue)
        if owner is None:
            return Operation(self._impls.release, values)
        self._mapping.require("owner", "owner")
        values[OWNER_PARAM] = valid_name(owner, "an owner")
        return Operation(self._impls.release_of_owner, values)

    @shaped_rows(select(ID))
    def capture(self, limit: int, *, queue: Any = None, owner: str | None = None) -> RowsOperation[Any]:
        """Acquire up to ``limit`` free mutexes, skipping those that other transactions have locked.

        :return: their ids in order, one per row: ``session.scalars(mutex.capture(3)).all()``.

        On MySQL and MariaDB the search keeps locks on all examined rows unless the transaction is READ COMMITTED, and
        is refused in autocommit. ``locks.run(...)`` runs it at READ COMMITTED, and returns the list of ids.

        >>> [row.id for row in session.execute(sl.Mutex().capture(2)).all()]
        ['task_b', 'task_c']
        """
        values = self._mapping.queue(queue) | row_admin.limit(limit)
        return RowsOperation(self._impls.capture, self._mapping.with_owner(values, owner))

    def held(self, limit: int = 1000) -> RowsOperation[Any]:
        """List held mutexes for monitoring: rows of ``queue, id, owner, acquired_at`` (UTC, by the server's clock).

        :param limit: how many at most, oldest acquisitions first.

        A value is ``None`` where there is no such column.

        >>> session.execute(mutex.held()).all()
        """
        return RowsOperation(self._impls.held, row_admin.limit(limit))

    @shaped(BOOL_ROW)
    def set_retries(self, id: Any, retries: int | None, *, queue: Any = None) -> Operation[Any]:
        """Set how many acquisitions are left.

        :param retries: their number; ``None``: unlimited.
        :return: ``True``.
        :raises UnknownTask: if it was never created.

        >>> session.scalar(sl.Mutex().set_retries("task_b", 3))
        True
        """
        number = row_admin.retries(self._mapping, retries, required=True)
        return Operation(self._impls.set_retries, self._mapping.identity(id, queue) | number)


class _MutexAcquire(ConditionalAcquire):
    def is_free(self, columns: RoleColumns) -> list[Any]:
        return [_flag_is_not(columns["acquired"], True)]

    def changes(self, columns: RoleColumns) -> dict[Any, Any]:
        changes = {columns["acquired"]: _flag(columns["acquired"], True)}
        if "owner" in columns:
            changes[columns["owner"]] = role_param(columns["owner"], "owner")
        if "acquired_at" in columns:
            changes[columns["acquired_at"]] = NowAfterWait()
        return changes | self.acquisition_changes(columns)


class _MutexRelease(ConditionalUpdate):
    """A release.

    :param of: the role whose value must match, the owner's name or the nonce of an acquisition; ``None``: none.
    """

    def __init__(self, mapping: RoleMapping, of: Literal["owner", "token"] | None) -> None:
        super().__init__(mapping, "mutex.release")
        self.of = of

    def repeatable(self, operation: Operation[Any]) -> bool:
        return self.of == "token"

    def condition(self, columns: RoleColumns) -> list[Any]:
        conditions = [_flag_is_not(columns["acquired"], False)]
        if self.of == "owner":
            conditions.append(columns["owner"] == role_param(columns["owner"], "owner"))
        elif self.of == "token":
            conditions.append(columns["token"] == role_param(columns["token"], "nonce"))
        return conditions

    def changes(self, columns: RoleColumns) -> dict[Any, Any]:
        return {columns["acquired"]: _flag(columns["acquired"], False)}

    def refusal(self, execution: Execution, row: Any) -> Any:
        if not execution.is_retry:
            return False
        # If the row is free and still has the nonce, an earlier try of this release took effect. With another nonce it
        # is unknown whether this release freed the mutex, or another one did.
        if row is not None and row.has_nonce and not row.acquired:
            return True
        raise OutcomeUnknown(
            f"{self.name}: the reply was lost, and {execution.values[ID_PARAM]!r} has been acquired since"
        )


def _flag(column: Any, value: bool) -> Any:
    if isinstance(column.type, Boolean):
        return true() if value else false()
    return literal(int(value), column.type)


def _flag_is_not(column: Any, value: bool) -> Any:
    # NULL counts as free
    different = column != _flag(column, value)
    if isinstance(column.type, Integer) and value:
        different = column == _flag(column, False)  # any other number is held
    return or_(column.is_(None), different) if column.nullable and value else different


class BatchAcquire(OperationImpl):
    """Acquire up to a limit of free rows, each as ``single`` acquires one; returns their ids in order.

    A CTE selects the rows with SKIP LOCKED. With ``IN (SELECT ... LIMIT)`` the planner may execute the SELECT more than
    once, and so acquire more rows than the limit.
    """

    def __init__(self, name: str, single: ConditionalAcquire) -> None:
        super().__init__()
        self.name, self.single, self.mapping = name, single, single.mapping
        self.needs_installation = single.needs_installation

    def build(self, context: BuildContext) -> Executable | None:
        if not context.backend.returning:
            return None
        columns = self.mapping.columns(context)
        free = self._where_free(columns).cte("locks_free")
        same_row = [column == free.c[column.key] for column in columns.table.primary_key]
        return self._update(columns).where(*same_row).returning(columns["id"])

    def multi_statement_reason(self, context: BuildContext) -> str:
        return "whose UPDATE can't return the rows it changed"

    def _where_free(self, columns: RoleColumns) -> Select[Any]:
        conditions = [*self.single.condition(columns), *self.mapping.class_condition()]
        if "queue" in columns:
            conditions.append(columns["queue"] == role_param(columns["queue"], "queue"))
        # the order of the primary key, whose queue is fixed: to sort by another order, InnoDB would lock all rows
        order = [key for key in columns.table.primary_key if "queue" not in columns or key is not columns["queue"]]
        free = select(*columns.table.primary_key).where(and_(*conditions)).order_by(*order).limit(_LIMIT)
        return skip_locked(free, key_share=True)  # type: ignore[no-any-return]

    def _update(self, columns: RoleColumns) -> Update:
        return update(columns.table).values(self.single.all_changes(columns))

    def route(self) -> dict[str, Any]:
        return self.mapping.route()

    def check_connection(self, execution: Execution) -> None:
        if self.statement(execution.context) is None and execution.backend.autocommit(execution.connection):
            raise execution.refused_autocommit()

    def run(self, execution: Execution) -> Result[Any]:
        columns = self.mapping.columns(execution.context)
        values = {**execution.values, **self.single.call_values(execution)}
        if not execution.backend.transaction_begun(execution.connection):
            execution.begin_as_writer(columns.table)
        statement = self.statement(execution.context)
        if statement is not None:
            ids = [row[0] for row in execution.execute(statement, values)]
        else:
            ids = self._select_then_update(execution, columns, values)
        target = self.mapping.target
        if target is not None and execution.session is not None:
            queue = {columns["queue"]: execution.values[QUEUE_PARAM]} if "queue" in columns else {}
            for id in ids:
                target.refresh(execution.session, self.single.changes(columns), {columns["id"]: id, **queue})
        rows = iter([(id,) for id in _sorted(ids)])  # RETURNING has no order
        return IteratorResult(SimpleResultMetaData(["id"]), rows)

    def _select_then_update(self, execution: Execution, columns: RoleColumns, values: dict[str, Any]) -> list[Any]:
        key = list(columns.table.primary_key)
        rows = execution.execute(self._where_free(columns).add_columns(columns["id"].label("_id")), values).all()
        for batch in execution.batches(rows):
            # The SELECT has locked the rows, so the condition is their primary keys alone. They are joined by OR: for a
            # list of a single pair MariaDB would use no index, and wait for rows that others have locked.
            same_rows = or_(*(and_(*map(operator.eq, key, row)) for row in batch))
            execution.execute(force_index(self._update(columns), "PRIMARY").where(same_rows), values)
        return [row[-1] for row in rows]


def _sorted(ids: list[Any]) -> list[Any]:
    try:
        return sorted(ids)
    except TypeError:  # members of an Enum have no order
        return sorted(ids, key=str)


class _MutexImpls:
    """The operations on the mutexes of one table, built once; by ``nowait``, or by whether retries are given."""

    def __init__(self, mapping: RoleMapping) -> None:
        self.acquire = _MutexAcquire.variants(mapping, "mutex.acquire", returns_token=False)
        self.acquire_token = _MutexAcquire.variants(mapping, "mutex.acquire_token", returns_token=True)
        self.release = _MutexRelease(mapping, None)
        self.release_of_owner = _MutexRelease(mapping, "owner")
        self.release_of_nonce = _MutexRelease(mapping, "token")
        self.capture = BatchAcquire("mutex.capture", self.acquire[False])
        self.create = row_admin.CreateRows.variants(mapping, "mutex.create", _initial)
        self.set_retries = row_admin.SetRetries(mapping, "mutex.set_retries")
        self.held = Listing(
            mapping,
            "mutex.held",
            select=lambda columns: [labelled(columns, role) for role in ("queue", "id", "owner", "acquired_at")],
            where=lambda columns: [_flag_is_not(columns["acquired"], False)],
            order_by=lambda columns: [columns[role] for role in ("acquired_at", "queue", "id") if role in columns],
        )


def _initial(columns: RoleColumns) -> dict[str, Any]:
    return {"acquired": _flag(columns["acquired"], False)}


@cache
def _shipped() -> tuple[RoleMapping, _MutexImpls]:
    mapping = RoleMapping("Mutex", lambda tables: tables.task_state, _ROLES)
    return mapping, _MutexImpls(mapping)

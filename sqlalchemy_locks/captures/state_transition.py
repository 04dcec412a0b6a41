"""StateTransition: tasks that workers capture and release by setting their status.

Tasks in one of the ``ready`` statuses are captured by setting ``captured``, and released by setting another status.
Retries, queues and timeouts are optional. A sweep stores the status ``timeout``, so that every reader sees it.

Guarantee: a captured task isn't captured again until its status is set or its timeout has passed. With a ``claim``, a
random number that each capture writes, a late worker can't change a task that another worker has captured since.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, case, literal, literal_column, select

from sqlalchemy_locks._validation import MAX_SECONDS, bounded_seconds, valid_int, valid_name
from sqlalchemy_locks.captures.capture import CaptureImpl, capture_operation
from sqlalchemy_locks.captures.claims import claim_number, claim_of, drawn_claim, identity_roles, require_claim
from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec, inlined
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.conditional_update import ConditionalUpdate
from sqlalchemy_locks.core.operation import BuildContext, Operation, RowsOperation
from sqlalchemy_locks.core.roles import ONE, RoleColumns, RoleMapping, param_name, retries_left, role_param
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, MYPY, E, EntityPattern, shaped
from sqlalchemy_locks.sql.clock import Now, SecondsAgo

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Table

    from sqlalchemy_locks.core.typing import AnyRowsOperation, R, SelectOf, T, class_in, of_shape

    if MYPY:
        from mypy_extensions import DefaultArg, DefaultNamedArg

        _Typed = Callable[
            ["StateTransition[T]", DefaultArg(int, "limit"), DefaultNamedArg(Any, "queue")], RowsOperation[R]
        ]

        def _of_class(selects: SelectOf[T, R]) -> Callable[[AnyRowsOperation], _Typed[T, R]]: ...

        # in the class, mypy's cache would mix up its type variables
        @_of_class(select)
        def _capture(transition: Any, limit: int = 1) -> RowsOperation[Any]: ...


_ROLES = ("queue", "id", "status", "claim", "updated_at", "timeout", "retries")
_LONGEST_STATUS = 64


class StateTransition(EntityPattern[E]):
    """Tasks that are captured and released by their status.

    :param entity: a mapped class or ``Table``; by default the shipped table ``lock.task``.
    :param id: the column that identifies a task; its values must be unique (within one ``queue``).
    :param status: the column for the status, of any type: text, ``Enum``, integer.
    :param ready: the statuses in which a task can be captured; a new task has the first of them.
    :param captured: the status of a captured task.
    :param timed_out: the status of a task whose timeout has passed.
    :param order_by: the order of capture: one expression or several; by default ``id``.
    :param queue: the column for queues; ids are then unique within a queue, and each call takes ``queue=``.
    :param retries: the column for the number of captures that are left; ``NULL`` is unlimited.
    :param claim: the integer column for a random number that identifies the capture; a ``BigInteger`` has room for 63
        random bits, an ``Integer`` for 31.
    :param updated_at: the column for the time at which the status was last set, by the server's clock.
    :param timeout: the column for how long a task may stay captured, in seconds; ``NULL`` is unlimited.
    :raises TypeError: if ``id`` or ``status`` is missing, or an argument isn't a column.
    :raises ValueError: for a column of another table than the class's own.

    >>> tasks = sl.StateTransition()
    >>> session.scalar(tasks.create("task_a", "task_b"))
    >>> mine = session.execute(tasks.capture(3)).all()
    >>> session.scalar(tasks.set_status(mine[0], "done"))
    True
    """

    def __init__(
        self,
        entity: type[E] | Table | None = None,
        *,
        id: Any = None,
        status: Any = None,
        ready: Any = ("done", "failed"),
        captured: Any = "in_progress",
        timed_out: Any = "timeout",
        order_by: Any = None,
        queue: Any = None,
        retries: Any = None,
        claim: Any = None,
        updated_at: Any = None,
        timeout: Any = None,
    ) -> None:
        columns = {
            "id": id,
            "status": status,
            "queue": queue,
            "retries": retries,
            "claim": claim,
            "updated_at": updated_at,
            "timeout": timeout,
        }
        if entity is not None and (id is None or status is None):
            raise TypeError(
                "StateTransition needs id= and status=, the columns of the class or table that it was given"
            )
        self._rows = RoleMapping("StateTransition", lambda tables: tables.task, _ROLES, entity, columns)
        require_claim(self._rows)
        statuses = tuple(ready) if isinstance(ready, (tuple, list, set, frozenset)) else (ready,)
        if not statuses or captured in statuses or timed_out == captured:
            raise ValueError("StateTransition: a task is ready in at least one status, and captured in another")
        if entity is None:
            for each in (*statuses, captured, timed_out):
                _status(each)
        order = () if order_by is None else tuple(order_by) if isinstance(order_by, (list, tuple)) else (order_by,)
        self._capture = _Capture(self._rows, statuses, captured, order)
        self._expire = _Expire(self._rows, captured, timed_out)
        self._set = {
            (claimed, force): _SetStatus(self._rows, captured, claimed=claimed, force=force)
            for claimed in (False, True)
            for force in (False, True)
        }
        initial = partial(_initial, statuses[0])
        self._create = row_admin.CreateRows.variants(self._rows, "StateTransition.create", initial)
        self._set_retries = row_admin.SetRetries(self._rows, "StateTransition.set_retries")

    @shaped(INT_ROW)
    def create(
        self, *ids: Any, queue: Any = None, retries: int | None = None, timeout: float | timedelta | None = None
    ) -> Operation[Any]:
        """Insert tasks that don't exist yet, in the first of the ``ready`` statuses.

        :param retries: how many captures they allow; by default the column's default (unlimited in the shipped table).
        :param timeout: how long they may stay captured, in whole seconds or as a ``timedelta`` of whole seconds; by
            default unlimited.
        :return: the number of inserted tasks.

        >>> tasks = sl.StateTransition()
        >>> session.scalar(tasks.create("task_a", "task_b"))
        2
        """
        values = row_admin.ids(self._rows, "StateTransition.create", ids, queue) | row_admin.retries(
            self._rows, retries
        )
        if self._rows.has("timeout"):
            values[param_name("timeout")] = None if timeout is None else _whole_seconds(timeout)
        elif timeout is not None:
            self._rows.require("timeout", "a timeout")
        return Operation(self._create[retries is not None], values)

    def _captures(self, limit: int = 1, *, queue: Any = None) -> RowsOperation[Any]:
        """Capture tasks that are ready, have a retry left, and aren't locked by another session.

        :param limit: the maximum number of tasks.
        :return: the tasks, in order: entities for a mapped class in a session, otherwise rows.

        >>> tasks = sl.StateTransition()
        >>> [task.id for task in session.execute(tasks.capture(3)).all()]
        ['task_c']
        """
        values = {**self._rows.queue(queue), LIMIT: valid_int(limit, "limit")}
        return capture_operation(self._capture, self._rows.target, values)

    if TYPE_CHECKING:
        if MYPY:
            capture = _capture  # pyright: ignore

        else:

            def capture(self, limit: int = 1, *, queue: Any = None):
                return of_shape(select(class_in(self)))
    else:
        capture = _captures
        capture.__name__, capture.__qualname__ = "capture", "StateTransition.capture"

    @shaped(BOOL_ROW)
    def set_status(
        self, id: Any, status: Any, *, queue: Any = None, claim: Any = None, force: bool = False
    ) -> Operation[Any]:
        """Release a captured task by setting its status.

        :param id: the entity or row that :meth:`capture` returned, or the task's id. An entity keeps the claim of its
            capture, while its attributes are refreshed after a commit and may then show another capture.
        :param queue: the queue, if ``id`` is an id.
        :param claim: the captured row's ``claim`` or the captured entity, if ``id`` is an id: nothing is set if the
            task was captured again since.
        :param force: set the status even if the task isn't captured. The claim of a captured entity or row is checked
            nevertheless: to override another capture, give the id without ``claim``.
        :return: whether it was set: ``False`` for a task that isn't captured, or was captured again.
        :raises UnknownTask: for a task that doesn't exist.
        :raises ValueError: for an entity that was loaded rather than captured.

        >>> tasks = sl.StateTransition()
        >>> [task] = session.execute(tasks.capture(1)).all()
        >>> session.scalar(tasks.set_status(task, "done"))
        True
        """
        if status is None:
            raise TypeError("StateTransition: a status can't be None")
        if (identity := claim_of(self._rows, id)) is not None:
            if queue is not None:
                raise ValueError("StateTransition: a captured task has its queue already: leave out queue=")
            id, queue = identity["id"], identity.get("queue")
            claim = identity.get("claim") if claim is None else claim
        values = self._rows.identity(id, queue)
        values[param_name("status")] = _status(status) if self._rows.target is None else status
        if claim is not None:
            values[param_name("claim")] = claim_number(self._rows, claim)
        return Operation(self._set[claim is not None, bool(force)], values)

    @shaped(INT_ROW)
    def expire(self, *, limit: int = 1000) -> Operation[Any]:
        """Set the status of captured tasks, in all queues, whose ``timeout`` has passed.

        :param limit: the maximum number of tasks, which bounds the transaction; repeat the call if it is reached.
        :return: the number of tasks.

        >>> tasks = sl.StateTransition()
        >>> session.scalar(tasks.expire())
        0
        """
        self._rows.require("timeout", "expire()")
        self._rows.require("updated_at", "expire()")
        return Operation(self._expire, {LIMIT: valid_int(limit, "limit")})

    @shaped(BOOL_ROW)
    def set_retries(self, id: Any, retries: int | None, *, queue: Any = None) -> Operation[Any]:
        """Set how many captures are left; ``None`` is unlimited.

        :return: ``True``.
        :raises UnknownTask: for a task that doesn't exist.

        >>> tasks = sl.StateTransition()
        >>> session.scalar(tasks.set_retries("task_c", 3))
        True
        """
        number = row_admin.retries(self._rows, retries, required=True)
        return Operation(self._set_retries, self._rows.identity(id, queue) | number)


def _initial(status: Any, at: RoleColumns) -> dict[str, Any]:
    """Return the initial values of a new task."""
    initial = {"status": literal(status, at["status"].type), "claim": literal_column("0"), "updated_at": Now()}
    return initial | {"timeout": bindparam(param_name("timeout"), type_=BigInteger())}


class _Capture(CaptureImpl):
    def __init__(self, rows: RoleMapping, ready: Iterable[Any], captured: Any, order_by: tuple[Any, ...]) -> None:
        super().__init__("StateTransition.capture")
        self.rows, self.ready, self.captured, self.order_by = rows, tuple(ready), captured, order_by
        self.needs_installation = rows.target is None

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = _timed(self.rows, context)
        changes = _stamped(at, inlined(at["status"], self.captured))
        if "retries" in at:
            changes[at["retries"]] = at["retries"] - ONE
        if "claim" in at:
            changes[at["claim"]] = drawn_claim(at["claim"])
        where = [at["queue"] == role_param(at["queue"], "queue")] if "queue" in at else []
        return CaptureSpec(
            at.table,
            (*where, *retries_left(at)),
            changes,
            self.order_by or (at["id"],),
            self.rows.target,
            one_of=(at["status"], self.ready),
            proof=tuple(at[role] for role in identity_roles(self.rows)),
        )


class _Expire(CaptureImpl):
    counts = True

    def __init__(self, rows: RoleMapping, captured: Any, timed_out: Any) -> None:
        super().__init__("StateTransition.expire")
        self.rows, self.captured, self.timed_out = rows, captured, timed_out
        self.needs_installation = rows.target is None

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # a second execution finds nothing

    def build_spec(self, context: BuildContext) -> CaptureSpec:
        at = _timed(self.rows, context)
        status, since, timeout = at["status"], at["updated_at"], at["timeout"]
        # a timeout out of range would raise an error, and then no task would be swept
        longest: Any = literal_column(str(int(MAX_SECONDS)))
        timeout = case(
            (timeout > longest, longest), (timeout < literal_column("0"), literal_column("0")), else_=timeout
        )
        overdue = (status == inlined(status, self.captured), since < SecondsAgo(timeout))
        return CaptureSpec(
            at.table, overdue, _stamped(at, literal(self.timed_out, status.type)), (since,), self.rows.target
        )


class _SetStatus(ConditionalUpdate):
    def __init__(self, rows: RoleMapping, captured: Any, *, claimed: bool, force: bool) -> None:
        super().__init__(rows, "StateTransition.set_status")
        self.captured, self.claimed, self.force = captured, claimed, force

    def condition(self, columns: RoleColumns) -> list[Any]:
        status = columns["status"]
        conditions = [] if self.force else [status == literal(self.captured, status.type)]
        if self.claimed:
            conditions.append(columns["claim"] == role_param(columns["claim"], "claim"))
        return conditions

    def changes(self, columns: RoleColumns) -> dict[Any, Any]:
        return _stamped(columns, role_param(columns["status"], "status"))


def _timed(rows: RoleMapping, context: BuildContext) -> RoleColumns:
    """Return the columns, after a check that ``updated_at`` keeps the server's time."""
    at = rows.columns(context)
    if rows.target is not None and "updated_at" in at:
        context.backend.require_time_zone(rows.pattern, [at["updated_at"]])
    return at


def _stamped(at: RoleColumns, status: Any) -> dict[Any, Any]:
    return {at["status"]: status, **({at["updated_at"]: Now()} if "updated_at" in at else {})}


def _status(value: Any) -> str:
    status = valid_name(value, "a status")
    if len(status) > _LONGEST_STATUS:
        raise ValueError(f"a status has {_LONGEST_STATUS} characters at most, and {value!r} has {len(status)}")
    return status


def _whole_seconds(value: float | timedelta) -> int:
    number = bounded_seconds(value, "timeout", zero=False)
    if number != int(number):
        raise ValueError(f"StateTransition: timeout is kept in whole seconds, not {value!r}")
    return int(number)

"""StateTransition: tasks that several workers take turns at, by their status.

The pattern: "Distributed locks: SQL", State transition: a task in one of the ``ready`` statuses is captured by
setting it to ``captured``, several at once, and given back by setting another. With its extensions: retries, queues,
and the status ``timeout``, which a sweep stores, so that readers and the database agree about it.

Promised: a captured task is captured by nobody else until its status is set, or its time has passed. Who was too
late can't change it, where there is a ``claim``: a number that each capture raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, case, literal, literal_column, select

from sqlalchemy_locks._validation import checked
from sqlalchemy_locks.captures.claims import claim_number, claim_of, identity_roles
from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import LIMIT, CaptureSpec, inlined
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.conditional_update import ConditionalUpdate
from sqlalchemy_locks.core.operation import BuildContext, Operation, RowsOperation, shaped
from sqlalchemy_locks.core.roles import ONE, RoleColumns, RoleMapping, param_name, raised, retries_left, role_param
from sqlalchemy_locks.core.typing import MYPY, E, Given
from sqlalchemy_locks.counts import counted
from sqlalchemy_locks.durations import LONGEST, span
from sqlalchemy_locks.sql.clock import Ago, Now

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Table

    from sqlalchemy_locks.core.typing import R, Selects, T, Vague, class_in, of_shape

    if MYPY:
        from mypy_extensions import DefaultArg, DefaultNamedArg

        _Typed = Callable[
            ["StateTransition[T]", DefaultArg(int, "limit"), DefaultNamedArg(Any, "queue")], RowsOperation[R]
        ]

        def _of_class(selects: Selects[T, R]) -> Callable[[Vague], _Typed[T, R]]: ...


_ROLES = ("queue", "id", "status", "claim", "updated_at", "timeout", "retries")
_LONGEST_STATUS = 64


class StateTransition(Given[E]):
    """Tasks with a status.

    :param entity: a mapped class or ``Table`` of your own; without one, the shipped table ``lock.task``.
    :param id: its column that names the task; its values must be unique (in one ``queue``).
    :param status: its column for the status, of any type: text, ``Enum``, integer.
    :param ready: the statuses in which a task can be captured; a new one of the shipped table has the first.
    :param captured: the status of a captured task. :param timed_out: that of one whose time has passed.
    :param order_by: which are captured first: one expression or several; by ``id`` without it.
    :param queue: its column for queues; ids are then unique inside a queue, and each call says ``queue=``.
    :param retries: its column for the captures that are left; ``NULL`` is as many as you like.
    :param claim: its integer column that each capture raises: the owner's proof.
    :param updated_at: its column for when the status was last set, by the server's clock.
    :param timeout: its column for how many seconds a task may stay captured; ``NULL``: as long as it takes.
    :raises TypeError: :raises ValueError: for what is not a column of that class's own table.

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
        given = {
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
        self._rows = RoleMapping("StateTransition", lambda tables: tables.task, _ROLES, entity, given)
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
        initial = _Initial(statuses[0])
        self._create = {
            counts: row_admin.CreateRows(self._rows, "StateTransition.create", initial, retries=counts)
            for counts in (False, True)
        }
        self._set_retries = row_admin.SetRetries(self._rows, "StateTransition.set_retries")

    @shaped(select(literal(1)))
    def create(
        self, *ids: Any, queue: Any = None, retries: int | None = None, timeout: float | None = None
    ) -> Operation[Any]:
        """Insert the absent ones of some tasks, in the first of the ``ready`` statuses.

        :param retries: how many captures they allow; ``None`` leaves that to the column's default (the shipped table:
            as many as you like).
        :param timeout: how long they may stay captured, in whole seconds.
        :return: how many were absent.

        >>> tasks = sl.StateTransition()
        >>> session.scalar(tasks.create("task_a", "task_b"))
        2
        """
        values = row_admin.ids(self._rows, "StateTransition.create", ids, queue) | row_admin.retries(
            self._rows, retries
        )
        if self._rows.has("timeout"):
            values[param_name("timeout")] = None if timeout is None else _whole(timeout)
        elif timeout is not None:
            self._rows.require("timeout", "a timeout")
        return Operation(self._create[retries is not None], values)

    def _captures(self, limit: int = 1, *, queue: Any = None) -> RowsOperation[Any]:
        """Take tasks that are ready, have a retry left, and that nobody else is taking.

        :param limit: how many at most.
        :return: them, in order: entities in a session where there is a mapped class, otherwise rows.

        >>> tasks = sl.StateTransition()
        >>> [task.id for task in session.execute(tasks.capture(3)).all()]
        ['task_c']
        """
        operation: RowsOperation[Any] = RowsOperation(
            self._capture, {**self._rows.queue(queue), LIMIT: counted(limit, "limit")}
        )
        target = self._rows.target
        if target is not None and target.mapper is not None:
            operation._entity_is(target.entity)
        return operation

    if TYPE_CHECKING:
        if MYPY:

            @_of_class(select)  # pyright: ignore[reportPossiblyUnboundVariable]
            def capture(self, limit: int = 1) -> RowsOperation[Any]: ...  # pyright: ignore[reportRedeclaration]

        else:

            def capture(self, limit: int = 1, *, queue: Any = None):
                return of_shape(select(class_in(self)))
    else:
        capture = _captures
        capture.__name__, capture.__qualname__ = "capture", "StateTransition.capture"

    @shaped(select(literal(True)))
    def set_status(
        self, id: Any, status: Any, *, queue: Any = None, claim: Any = None, force: bool = False
    ) -> Operation[Any]:
        """Give a captured task back.

        :param id: what :meth:`capture` gave, an entity or a row; or the task's id. An entity remembers what it was
            captured with, while its attributes are read anew after a commit, and may then be somebody else's.
        :param queue: the queue, where ``id`` is an id.
        :param claim: what the captured row's ``claim`` says, where ``id`` is an id, or the captured entity: nothing is
            set if somebody has captured it since.
        :param force: whatever its status is; and whoever has it, where ``id`` is an id and ``claim`` is not given. What
            was captured brings its claim, which holds nevertheless: to override another's capture, give the id.
        :return: whether it was set: ``False`` for a task that isn't captured, or isn't yours.
        :raises UnknownTask: for a task that isn't there.
        :raises ValueError: for an entity that was not captured, but loaded.

        >>> tasks = sl.StateTransition()
        >>> [task] = session.execute(tasks.capture(1)).all()
        >>> session.scalar(tasks.set_status(task, "done"))
        True
        """
        if status is None:
            raise TypeError("StateTransition: a status can't be None")
        if (known := claim_of(self._rows, id)) is not None:
            if queue is not None:
                raise ValueError("StateTransition: what was captured knows its queue: leave out queue=")
            id, queue = known["id"], known.get("queue")
            claim = known.get("claim") if claim is None else claim
        values = self._rows.identity(id, queue)
        values[param_name("status")] = _status(status) if self._rows.target is None else status
        if claim is not None:
            values[param_name("claim")] = claim_number(self._rows, claim)
        return Operation(self._set[claim is not None, bool(force)], values)

    @shaped(select(literal(1)))
    def expire(self, *, limit: int = 1000) -> Operation[Any]:
        """Set the status of captured tasks, of all queues, whose own ``timeout`` has passed.

        :param limit: how many at most, so that no transaction is long; call it again when as many were found.
        :return: how many.

        >>> tasks = sl.StateTransition()
        >>> session.scalar(tasks.expire())
        0
        """
        self._rows.require("timeout", "expire()")
        self._rows.require("updated_at", "expire()")
        return Operation(self._expire, {LIMIT: counted(limit, "limit")})

    @shaped(select(literal(True)))
    def set_retries(self, id: Any, retries: int | None, *, queue: Any = None) -> Operation[Any]:
        """Say how many captures are left; ``None``: as many as you like.

        :return: ``True``. :raises UnknownTask: for a task that isn't there.

        >>> tasks = sl.StateTransition()
        >>> session.scalar(tasks.set_retries("task_c", 3))
        True
        """
        left = row_admin.retries(self._rows, retries, required=True)
        return Operation(self._set_retries, self._rows.identity(id, queue) | left)


class _Initial:
    """What a new task has."""

    def __init__(self, status: Any) -> None:
        self.status = status

    def __call__(self, at: RoleColumns) -> dict[str, Any]:
        initial = {"status": literal(self.status, at["status"].type), "claim": literal_column("0"), "updated_at": Now()}
        return initial | {"timeout": bindparam(param_name("timeout"), type_=BigInteger())}


class _Capture(CaptureImpl):
    def __init__(self, rows: RoleMapping, ready: Iterable[Any], captured: Any, order_by: tuple[Any, ...]) -> None:
        super().__init__("StateTransition.capture")
        self.rows, self.ready, self.captured, self.order_by = rows, tuple(ready), captured, order_by
        self.needs_installation = rows.target is None

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def taken(self, context: BuildContext) -> CaptureSpec:
        at = _timed(self.rows, context)
        changes = _stamped(at, inlined(at["status"], self.captured))
        if "retries" in at:
            changes[at["retries"]] = at["retries"] - ONE
        if "claim" in at:
            changes[at["claim"]] = raised(at["claim"])
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
        return True  # the first time leaves nothing for a second one

    def taken(self, context: BuildContext) -> CaptureSpec:
        at = _timed(self.rows, context)
        status, since, timeout = at["status"], at["updated_at"], at["timeout"]
        # one that no instant can be computed with would be an error, and keep all others from being swept
        longest: Any = literal_column(str(int(LONGEST)))
        timeout = case(
            (timeout > longest, longest), (timeout < literal_column("0"), literal_column("0")), else_=timeout
        )
        overdue = (status == inlined(status, self.captured), since < Ago(timeout))
        return CaptureSpec(
            at.table, overdue, _stamped(at, literal(self.timed_out, status.type)), (since,), self.rows.target
        )


class _SetStatus(ConditionalUpdate):
    def __init__(self, rows: RoleMapping, captured: Any, *, claimed: bool, force: bool) -> None:
        super().__init__(rows, "StateTransition.set_status")
        self.captured, self.claimed, self.force = captured, claimed, force
        self.insists = claimed or force

    def condition(self, at: RoleColumns) -> list[Any]:
        conditions = [] if self.force else [at["status"] == literal(self.captured, at["status"].type)]
        return [*conditions, at["claim"] == role_param(at["claim"], "claim")] if self.claimed else conditions

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return _stamped(at, role_param(at["status"], "status"))


def _timed(rows: RoleMapping, context: BuildContext) -> RoleColumns:
    """The rows of one place, where their time can be told."""
    at = rows.at(context)
    if rows.target is not None and "updated_at" in at:
        context.backend.refuse_zoneless(rows.what, [at["updated_at"]])
    return at


def _stamped(at: RoleColumns, status: Any) -> dict[Any, Any]:
    return {at["status"]: status, **({at["updated_at"]: Now()} if "updated_at" in at else {})}


def _status(given: Any) -> str:
    status = checked(given, "a status")
    if len(status) > _LONGEST_STATUS:
        raise ValueError(f"a status has {_LONGEST_STATUS} characters at most, and {given!r} has {len(status)}")
    return status


def _whole(given: float) -> int:
    number = span(given, "timeout", zero=False)
    if number != int(number):
        raise ValueError(f"StateTransition: timeout is kept in whole seconds, not {given!r}")
    return int(number)

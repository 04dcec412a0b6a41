"""When a period of ``Timeout`` is over, and how its row is taken: the conditions and the changes of its statements.

What is promised: the clock is the server's, unless the timeout was given one of its own, and read when the row is
locked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Update, and_, bindparam, case, cast, or_, select, update

from sqlalchemy_locks import _timezones as zones
from sqlalchemy_locks.core.conditional_update import Answer, ConditionalAcquire, ConditionalUpdate
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation
from sqlalchemy_locks.core.roles import RoleColumns, RoleMapping, one, param_name, role_param
from sqlalchemy_locks.sql.clock import Epoch

Clock = Callable[[], "float | datetime"]


class TimeoutKind(NamedTuple):
    """What makes the statements of two timeouts differ."""

    overrides: bool
    windowed: bool
    zone: Any
    clock: Clock | None


class TimeoutAcquire(ConditionalAcquire):
    def __init__(
        self, rows: RoleMapping, name: str, answer: Answer, kind: TimeoutKind, patient: TimeoutAcquire | None = None
    ) -> None:
        super().__init__(rows, name, answer, patient=patient)
        self.kind = kind

    @property
    def now(self) -> Any:
        return Epoch() if self.kind.clock is None else bindparam(param_name("now"), type_=BigInteger())

    def free(self, at: RoleColumns) -> list[Any]:
        return self._free(at, self.now)

    def _free(self, at: RoleColumns, now: Any) -> list[Any]:
        every = bindparam(param_name("every"), type_=BigInteger()) if self.kind.overrides else at["timeout"]
        if self.kind.windowed:
            began = self._local(now)
            free = self._local(at["ts"]) < began - began % every
        else:
            free = wide(at["ts"]) + every < now
        return [or_(at["ts"].is_(None), free) if at["ts"].nullable else free]

    def _local(self, instant: Any) -> Any:
        """Seconds since 1970 on the clocks of the zone."""
        if self.kind.zone is None:
            return instant
        part = {name: bindparam(param_name(f"zone_{name}"), type_=BigInteger()) for name in zones.Offsets._fields}
        return instant + case(
            (instant < part["first"], part["before"]),
            (instant < part["second"], part["between"]),
            else_=part["after"],
        )

    def chosen(self, context: BuildContext, at: RoleColumns) -> Update:
        if context.backend.locking != "functions":
            return super().chosen(context, at)
        # The row is locked first and the clock read after that, in one statement: an UPDATE that waits for the row
        # stamps it with the instant at which it began to wait.
        due = select(*at.table.primary_key).where(and_(*one(self.rows, at), *self.condition(at)))
        due_cte = due.with_for_update(skip_locked=self.patient is not None, key_share=True).cte("locks_due")
        due_cte = due_cte.prefix_with("MATERIALIZED")
        clock = select(due_cte, self.now.label("locks_now")).cte("locks_clock").prefix_with("MATERIALIZED")
        same = [column == clock.c[column.key] for column in at.table.primary_key]
        now = clock.c.locks_now
        conditions = [*same, *self._free(at, now), *self.allowed(at)]
        return update(at.table).where(and_(*conditions)).values(self._changes(at, now) | self.rows.bumped())

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        return self._changes(at, self.now)

    def _changes(self, at: RoleColumns, now: Any) -> dict[Any, Any]:
        return {at["ts"]: now} | self.spent(at)

    def given(self, execution: Execution) -> dict[str, Any]:
        given, instant = super().given(execution), time.time()
        if self.kind.clock is not None:
            given[param_name("now")] = instant = _instant(self.kind.clock())
        if self.kind.zone is not None:
            offsets = zones.around(self.kind.zone, instant)
            given |= {param_name(f"zone_{name}"): value for name, value in offsets._asdict().items()}
        return given


class TimeoutGiveBack(ConditionalUpdate):
    """By the very acquisition whose nonce is given: its period is over in a while."""

    def __init__(self, rows: RoleMapping) -> None:
        super().__init__(rows, "timeout.give_back")

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True

    def condition(self, at: RoleColumns) -> list[Any]:
        return [at["token"] == role_param(at["token"], "whose")]

    def changes(self, at: RoleColumns) -> dict[Any, Any]:
        every, due = (bindparam(param_name(name), type_=BigInteger()) for name in ("every", "due"))
        return {at["ts"]: Epoch() - every + due}


def wide(column: Any) -> Any:
    """The sum of two integers of 32 bits may need more."""
    return column if isinstance(column.type, BigInteger) else cast(column, BigInteger())


def _instant(given: float | datetime) -> int:
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ValueError(f"Timeout: the clock gave a datetime without a zone: {given!r}")
        given = given.timestamp()
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"Timeout: the clock gives seconds since 1970 or an aware datetime, not {given!r}")
    if not math.isfinite(given):
        raise ValueError(f"Timeout: the clock gave {given!r}")
    return math.floor(given)

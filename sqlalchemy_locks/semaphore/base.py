"""What the operations of a semaphore share: one call of a function where there are functions, else some statements.

Rows are locked in one order everywhere: a request before its permits, a request before semaphores, and semaphores
by name. Releasing needs no semaphore, so it waits for nobody who acquires.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Text, bindparam, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.operation import BuildContext, Execution, Operation, OperationImpl, side_connection
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.semaphore.statements import statements
from sqlalchemy_locks.sql.elements import LockFunction, ReadCommitted
from sqlalchemy_locks.values import Grant

#: of the functions: how long to wait, as the server's own setting takes it
LOCK_WAIT = bindparam("lock_wait", type_=Text())
#: the semaphores whose rows a transaction of InnoDB has changed itself: there it sees its own version of the row
_TOUCHED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
#: those that have released something themselves
_RELEASING: WeakSet[Any] = WeakSet()
_read_committed = select(ReadCommitted())


class SemaphoreBody(OperationImpl):
    """An operation that is one function call on PostgreSQL and YugabyteDB, and several statements elsewhere."""

    sends_wait = True

    def __init__(self) -> None:
        super().__init__()
        self.name = f"semaphore.{type(self).__name__.lower()}"

    def call(self) -> LockFunction | None:
        """The function's call, or ``None`` where there is none on any engine."""
        return None

    def build(self, context: BuildContext) -> Executable | None:
        call = self.call() if context.backend.locking == "functions" else None
        return None if call is None else self.asked(call)

    def asked(self, call: LockFunction) -> Executable:
        return select(call)

    def because(self, context: BuildContext) -> str:
        return "where its rows are locked, looked at and written one after another"

    def repeatable(self, operation: Operation[Any]) -> bool:
        return True  # done again, it finds what it did

    def check_connection(self, execution: Execution) -> None:
        if (
            self.writes
            and self.statement(execution.context) is None
            and execution.backend.autocommit(execution.connection)
        ):
            raise self._several_in_autocommit(execution)

    def _several_in_autocommit(self, execution: Execution) -> Unsupported:
        return Unsupported(
            f"{self.name} is several statements on {execution.backend.name}, which must be one transaction, and this "
            "connection is in autocommit: execute it inside a transaction, or use Locks"
        )

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        if statement is not None:
            return self.answer(execution, execution.by_cursor(statement, self.arguments(execution), _first))
        with execution.waiting():
            if self.writes and execution.backend.locking == "file":
                self._take_file(execution)
            return self.by_statements(execution, self.statements(execution))

    def arguments(self, execution: Execution) -> dict[str, Any]:
        """The parameters of the function's call."""
        return {
            **execution.values,
            "lock_wait": None if execution.wait is None else execution.backend.wait_value(execution.wait),
        }

    def answer(self, execution: Execution, row: Any) -> Any:
        """What comes back, of the one row that the function gave."""
        return row[0]

    def by_statements(self, execution: Execution, made: Any) -> Any:
        raise NotImplementedError

    def statements(self, execution: Execution) -> Any:
        return statements(execution.context.tables, rows=execution.backend.locking == "rows")

    def _take_file(self, execution: Execution) -> None:
        with execution.backend.classify_timeouts(execution.connection):
            execution.take_file(execution.context.tables.semaphore)
        if not execution.backend.transaction_begun(execution.connection):
            raise self._several_in_autocommit(execution)


def _first(cursor: Any) -> Any:
    return cursor.fetchone()


def locked(execution: Execution, made: Any, name: str) -> Any:
    """A semaphore's row, locked until the transaction ends; ``None`` without one, or when it is deleted."""
    row = execution.execute(made.lock, {"called": name}).first()
    return None if row is None or row.capacity is None else row


def request_shared(execution: Execution, made: Any) -> Any:
    """The request's row, which nobody can end before this transaction does, if there is one.

    Whether it has ``expired`` is by the instant at which its lock was had.
    """
    return _request(execution, made.request, made.chosen_shared, made.request_shared)


def request_locked(execution: Execution, made: Any) -> Any:
    """The request's row, locked until the transaction ends, if there is one."""
    return _request(execution, made.request, made.chosen_locked, made.request_locked)


def _request(execution: Execution, look: Any, chosen: Any, called: Any) -> Any:
    values = {"called": execution.values["external_id"]}
    if may_be_old(execution):
        # above READ COMMITTED, MariaDB locks the gap before what it finds by any key but the primary one
        seen = execution.execute(look, values).scalar()
        if seen is None and not execution.execute(_read_committed, {}).scalar():
            # where it is absent, a look with a lock would lock the gap: other ids couldn't be asked for
            with contextlib.suppress(DBAPIError), side_connection(execution) as connection:
                seen = connection.execute(look, values, execution_options=execution.options).scalar()
                if seen is None:
                    return None
        row = None if seen is None else execution.execute(chosen, {"which": seen}).first()
        if row is not None:
            return row
    return execution.execute(called, values).first()


def touch(execution: Execution, semaphore: int) -> None:
    """This transaction has changed the semaphore's row itself."""
    transaction = execution.connection.get_transaction()
    if may_be_old(execution) and transaction is not None:
        _TOUCHED.setdefault(transaction, set()).add(semaphore)


def used(execution: Execution, made: Any, rows: Iterable[Any]) -> tuple[dict[int, float], Any]:
    """How many permits of locked semaphores are held, at most, and the instant: read after the locks were had.

    A plain read of InnoDB may be as old as its transaction's snapshot. Another's grant that it doesn't show has changed
    the fence of the locked row, though: then, and where the row shows this transaction's own change instead, it is as
    if all of them were held. What was released since the snapshot it counts as held. :func:`make_room` and
    :func:`surely` ask again.
    """
    rows = list(rows)
    found = {row.id: row for row in execution.execute(made.used, {"ids": [row.id for row in rows]})}
    touched = _TOUCHED.get(execution.connection.get_transaction(), ())
    sums: dict[int, float] = {}
    now = None
    for row in rows:
        seen = found.get(row.id)
        # READ UNCOMMITTED shows a release that may be rolled back; a snapshot from before a semaphore doesn't show it
        dirty = row.dirty and not execution.read_committed
        if dirty or seen is None or row.fence != seen.fence or row.id in touched:
            sums[row.id] = math.inf
        else:
            sums[row.id] = int(seen.used)
            now = now or seen.now
    return sums, now


def may_be_old(execution: Execution) -> bool:
    """Whether a plain read may show what is no longer so."""
    return execution.backend.locking == "rows" and not execution.read_committed


def surely(execution: Execution, made: Any, row: Any) -> tuple[int, Any]:
    """As ``used``, of one semaphore, and current in any snapshot: for who would be refused otherwise."""
    if not may_be_old(execution):
        sums, now = used(execution, made, [row])
        return int(sums[row.id]), now
    total: Any = execution.execute(made.used_now, {"which": row.id}).scalar_one()
    # in a later statement, since it may have waited for who is releasing
    return int(total), execution.execute(made.clock, {}).scalar_one()


def make_room(execution: Execution, made: Any, semaphore: int, most: int) -> bool:
    """Whether no more than so many permits may be held after all: what has expired is taken back.

    The sum that said otherwise may be older than a release (InnoDB). To ask with a lock would keep the holders from
    releasing, and others from acquiring, until this transaction ends: so what is committed is looked at from beside
    it, and where there is no room, there is none. A grant is never based on that look.
    """
    if not may_be_old(execution):
        return take_back(execution, made, semaphore) > 0
    try:
        with side_connection(execution) as connection:
            values, options = {"which": semaphore}, execution.options
            expired = connection.execute(made.expired_of, values, execution_options=options).all()
            held = connection.execute(made.held_of, values, execution_options=options).scalar_one()
    except DBAPIError:
        # no connection can be had: the locks, then
        take_back(execution, made, semaphore)
        return True
    taken = take(execution, made, [tuple(row) for row in expired])
    # what this transaction has released itself, nobody sees from beside it
    return bool(taken) or held <= most or execution.connection.get_transaction() in _RELEASING


def take_back(execution: Execution, made: Any, semaphore: int) -> int:
    """Release what has expired on a semaphore; how many requests that was."""
    return len(take(execution, made, [tuple(row) for row in execution.execute(made.expired_of, {"which": semaphore})]))


def take(execution: Execution, made: Any, judged: list[tuple[int, datetime]]) -> list[int]:
    """Release those requests that have expired or are still as they were judged, but what somebody is working on."""
    if not judged:
        return []
    known = dict(judged)
    rows = execution.execute(made.still, {"ids": list(known)}).all()
    taken = [row.id for row in rows if row.expired or row.renewed_at == known[row.id]]
    for request in taken:
        end(execution, made, request)
    return taken


def end(execution: Execution, made: Any, request: int) -> None:
    """Release a locked request: its permits first, so that where a wait for them times out, it can be done again."""
    transaction = execution.connection.get_transaction()
    if may_be_old(execution) and transaction is not None:
        _RELEASING.add(transaction)
    # by their own ids, which locks no gap; only a snapshot from before them doesn't show them
    permits = execution.execute(made.permits_of, {"which": request}).scalars().all()
    if permits:
        execution.execute(made.free_one, [{"which": permit} for permit in permits])
    else:
        execution.execute(made.free, {"which": request})
    execution.execute(made.end, {"which": request})


def drop(execution: Execution, made: Any, request: int) -> None:
    """Have a new request of this transaction never been."""
    permits = execution.execute(made.permits_of, {"which": request}).scalars().all()
    if permits:
        execution.execute(made.drop_permit, [{"which": permit} for permit in permits])
    execution.execute(made.forget, {"which": request})


def external_id(value: Any) -> str:
    """The id of a request, as it is stored; a grant stands for its own."""
    return valid_name(getattr(value, "external_id", value), "the external_id of a request")


def token_of(value: str | Grant) -> str | None:
    """What tells the request of a grant from every other of its id; ``None`` for a bare id, which stands for any."""
    # one that was denied has no request: it stands for nobody else's either
    return value.token or "" if isinstance(value, Grant) else None


def whole(value: Any, what: str, least: int) -> int:
    """A number of permits.

    :raises TypeError: :raises ValueError: unless it is an ``int`` from ``least`` to 2147483647.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is an int, not {value!r}")
    if not least <= value < 2**31:
        raise ValueError(f"{what} is from {least} to {2**31 - 1}, not {value}")
    return int(value)

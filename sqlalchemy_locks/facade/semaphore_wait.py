"""Waiting for room in semaphores, in turn: whoever has waited longest comes first.

A request is tried at once, in one round trip where the engine has functions, unless others wait already. Who is denied
stands in a line: in memory behind those of its own process, and in front of that one in the server's line of all
processes (an advisory lock of a transaction, the lock of a row on YugabyteDB, or ``GET_LOCK``), or in SQLite's beside
the database. Whoever has its turn there looks again and again, without a lock, and acquires when there is room; the
others wait and cost little.

Lines are for fairness alone. Whether there is room is decided by the acquire and by nothing else, and whoever has
stood in a line for a minute tries regardless, so that nothing hangs on another's being alive. Who holds permits of the
semaphore already stands in none: whoever is in front may be waiting for those.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.operation import Operation, build_context, fresh_nonce, translated
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockTimeout,
    OutcomeUnknown,
    PoolTimeout,
    ReentryError,
    RequestOver,
    UnknownSemaphore,
)
from sqlalchemy_locks.keys import key
from sqlalchemy_locks.runtime.local_queue import Backoff, local_queues
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.semaphore.availability import in_turn, place_key, room, short_of
from sqlalchemy_locks.semaphore.reclaim import reclaim
from sqlalchemy_locks.values import Grant

if TYPE_CHECKING:
    from sqlalchemy_locks.dialects.sqlite_line import Ticket

#: the longest wait for a semaphore's row, and for the gate before it, in seconds
PATIENCE = 5.0
#: after so many seconds in a line one tries out of turn
TURN = 60.0
#: the same in the server's line, where the wait keeps signals from being heard
DEAF = 5.0
#: the same where it keeps a pooler's server connection, which may be the one that the holder needs
KEPT = 1.0
#: a pooler that takes so long for an answer has too few of them, and nobody waits on one for a while: in seconds
SLOW, ASIDE = 0.25, 60.0

Settled = Callable[[Operation[Any]], Any]


class SemaphoreWaiter:
    """One request, until it is granted.

    :param request: the operation that acquires.
    :param patience: the longest wait in seconds, ``None`` for ever, 0 for one try.
    :param own: how many permits of each semaphore whoever asks holds already, and can't give back while it waits.
    :param known: the request may have been granted before, and must not wait behind others then.
    """

    def __init__(
        self,
        engine: Engine,
        settled: Settled,
        sleep: Sleep,
        request: Operation[Any],
        patience: float | None,
        own: Mapping[str, int],
        known: bool,
        reclaims: bool = False,
    ) -> None:
        self._engine = engine
        self._settled = settled
        self._sleep = sleep
        self.request = request
        self._permits: dict[str, int] = request._values["permits"]
        self.patience = patience
        self.began = time.monotonic()
        self._deadline = None if patience is None else self.began + patience
        self._own = own
        #: the last turn in the server's line was the first one's, and kept a pooler's connection
        self._kept = False
        #: the last try ended without an answer
        self._busy = False
        #: a COMMIT of the grant had no answer, and no try has had one since
        self._unanswered = False
        #: the semaphores whose whole capacity, unless it is 0, is less than what is asked for
        self._beyond: set[str] = set()
        #: the semaphores that had no room when the wait was given up
        self.lacking: tuple[str, ...] = ()
        self._known, self._reclaims = known, reclaims
        #: when what was granted was asked for, by this machine's own clock
        self.asked_at = clock()
        self._backend = backend_for(engine.dialect)
        self._lines = local_queues(engine.dialect)
        options = engine.get_execution_options()
        self._where = place_key(build_context(engine.dialect, options), options)
        self._keys = {name: key("sqlalchemy_locks.semaphore", self._where, name) for name in self._permits}

    def granted(self) -> Grant:
        """The grant.

        :raises LockTimeout: :raises RequestOver: :raises ReentryError: as ``Locks.acquire`` and its blocks.
        """
        while True:
            try:
                return self._granted()
            except RequestOver:
                # who reclaims is one of those who ask then, and perhaps not the one who is granted
                if not self._reclaims or not self._reclaimed():
                    raise
            except (OutcomeUnknown, UnknownSemaphore, IdempotencyConflict):
                raise
            except Exception as error:
                if not self._unanswered:
                    raise
                raise OutcomeUnknown(
                    f"{self.request.name}: an answer was lost, and what followed failed: it was done, or it was not"
                ) from error

    def _reclaimed(self) -> bool:
        """Whether the id is to be asked for again, its request forgotten or not: a write under its guard keeps it."""
        operation = reclaim(self.request._values["external_id"])
        try:
            return bool(self._ask(operation.execution_options(locks_wait=self._patient())))
        except PoolTimeout:
            raise
        except LockTimeout as error:
            if self.patience != 0 and self._left() != 0:
                return True
            self._busy = True
            raise self._timed_out() from error

    def _granted(self) -> Grant:
        once = self.patience == 0
        passing = bool(self._known or self._own)
        name = None if passing else self._somebody(memory=not once)
        if name is not None and once:
            raise self._timed_out(name)
        if name is None:
            plain = self._own or not self._backend.server_queues
            grant = self._try(self.request if plain else in_turn(self.request, self._keys))
            if grant is not None and grant.acquired:
                return grant
            if once:
                raise self._timed_out(*(() if grant is None else grant.exhausted))
            name = next(iter(self._permits if grant is None else grant.exhausted))
        if self._own:
            self._short(name)
        while True:
            aside = bool(self._own) or name in self._beyond
            found = self._looking(name, aside) if aside else self._stood(name)
            if isinstance(found, Grant):
                return found
            name = found  # and out of the other's line, so that nobody is kept from what is free
            if self._left() == 0:
                raise self._timed_out(name)

    def _somebody(self, memory: bool = True) -> str | None:
        """The first of the semaphores in whose line somebody stands, as far as that is known without a statement.

        :param memory: of this process, too.
        """
        stood = self._lines.anybody(("line", self._where, name) for name in self._permits) if memory else None
        if stood is not None:
            name: str = stood[-1]
            return name
        line = self._backend.line_beside(self._engine, self._left())
        return None if line is None else next((n for n, k in self._keys.items() if line.anybody(k)), None)

    def _stood(self, name: str) -> Grant | str:
        """Wait in the line of a semaphore: the grant, or which other one has no room."""
        turn = self._lines.turn(("line", self._where, name))
        try:
            while not turn.come(min(TURN, self._shortest())):
                if self._left() == 0:
                    raise self._timed_out(name)
                found = self._out_of_turn(name)
                if found is not None:
                    return found
            return self._in_front(name)
        finally:
            turn.give()

    def _out_of_turn(self, name: str) -> Grant | str | None:
        """Try, whoever comes first: the grant, which other one has no room, or ``None`` where it is this one."""
        grant = self._try(self.request)
        if grant is None or grant.acquired:
            return grant
        return None if name in grant.exhausted else grant.exhausted[0]

    def _in_front(self, name: str) -> Grant | str:
        """Wait, the first of this process in the line of a semaphore: the grant, or which other one has no room."""
        with self._lines.connected(self._engine.pool) as connected:
            while connected and self._backend.server_queues and self._shortest() > self._backend.min_queue_wait:
                try:
                    found = self._in_line(name)
                except PoolTimeout:
                    raise
                except LockTimeout as error:
                    if self._left() == 0:
                        raise self._timed_out(name) from error
                    found = False
                except DBAPIError as error:
                    if not (error.connection_invalidated or self._passing(error)):
                        raise
                    found = False
                except DriverTimeout:
                    found = False
                if found is None:
                    break
                if found is not False:
                    return found
                # its minute is over, or it was cut off, perhaps when it had been granted already
                asked = time.monotonic()
                out_of_turn = self._out_of_turn(name)
                if self._kept and (isinstance(out_of_turn, Grant) or self._slow(asked)):
                    # what was had as soon as the connection was given back had waited for that
                    self._aside()
                if out_of_turn is not None:
                    return out_of_turn
                self._pause(name, random.uniform(0, 0.05))
        line = self._backend.line_beside(self._engine, self._left())
        if line is None:
            return self._looking(name)
        with line.ticket(self._keys[name]) as ticket:
            until = time.monotonic() + TURN
            while ticket.before():
                self._pause(name, ticket.pause())
                if time.monotonic() > until:
                    out_of_turn, until = self._out_of_turn(name), time.monotonic() + TURN
                    if out_of_turn is not None:
                        return out_of_turn
            return self._looking(name, ticket=ticket)

    def _in_line(self, name: str) -> Grant | str | Literal[False] | None:
        """As ``_in_front``, in the server's line; ``False`` when its turn did not come, ``None`` where none is kept."""
        left, self._kept = self._left(), False
        if time.monotonic() < self._lines.aside_until:
            return None
        asked, short = time.monotonic(), ShortTransaction(self._engine)
        short.open(within=left)
        try:
            with translated(short.backend):
                longest, pooled = TURN, short.backend.behind_pooler(short.connection)
                if threading.current_thread() is threading.main_thread() and short.backend.blocks_signals(
                    short.connection
                ):
                    longest = DEAF
                if pooled:
                    short.connection.exec_driver_sql("SELECT 1")  # which takes as long as there is no connection
                    if self._slow(asked):
                        self._aside()
                        return None
                keep = KEPT if pooled else math.inf
                turn = min(longest, keep, math.inf if left is None else left)
                if not short.backend.join_queue(short.connection, self._keys[name], turn):
                    return False
            self._kept = pooled
            return self._at_the_head(short, name, keep)
        finally:
            try:
                if not short.connection.invalidated:
                    self._leave(short, name)
            finally:
                short.abandon()

    def _slow(self, asked: float) -> bool:
        return time.monotonic() - asked > SLOW

    def _aside(self) -> None:
        self._lines.aside_until = time.monotonic() + ASIDE

    def _leave(self, short: ShortTransaction, name: str) -> None:
        try:
            short.backend.leave_queue(short.connection, self._keys[name])
        except BaseException:
            # rather no connection than one that goes back to the pool in line
            short.connection.invalidate()
            raise

    def _at_the_head(self, short: ShortTransaction, name: str, longest: float) -> Grant | str | Literal[False]:
        """Look until there is room, ``longest`` seconds at most: whoever holds may need the connection to give it."""
        pace, until = Backoff(), time.monotonic() + longest
        options = {"locks_nonce": fresh_nonce(), "locks_wait": PATIENCE}
        while True:
            exhausted = self._short_of(room(self.request).value(short.connection, {}))
            if not exhausted:
                self.asked_at = clock()
                grant = self._decided(self.request.value(short.connection, options))
                if grant.acquired:
                    self._unanswered = True
                    try:
                        short.transaction.commit()
                    except DBAPIError as error:
                        self._unanswered = error.connection_invalidated
                        raise
                    return grant
                exhausted = list(grant.exhausted)
                if short.backend.locking == "rows":
                    # somebody came between; a denial keeps its locks, here, until the transaction ends
                    short.transaction.rollback()
                    short.transaction, _ = short.backend.begin(short.connection)
            if name not in exhausted:
                return exhausted[0]
            if name in self._beyond:
                return name
            if time.monotonic() > until:
                return False
            self._pause(name, pace.pause())

    def _looking(self, name: str, aside: bool = False, ticket: Ticket | None = None) -> Grant | str:
        """As ``_in_front``, without a line of the server's, and without a connection between two looks.

        :param aside: nobody is kept waiting by that, as who asks for more than there is would keep everybody.
        :param ticket: stands for this one's place in front.
        """
        # where nobody stands in front, who has just given it back and asks again is sooner than who rarely looks
        pace = Backoff(50 if time.monotonic() < self._lines.aside_until else 10)
        while True:
            exhausted = self._short(name)
            if not exhausted:
                grant = self._try(self.request)
                if grant is not None and grant.acquired:
                    return grant
                exhausted = [name] if grant is None else list(grant.exhausted)
            if name not in exhausted:
                return exhausted[0]
            if not self._own and aside is not (name in self._beyond):
                return name
            if ticket is not None:
                ticket.stay()
            self._pause(name, random.uniform(0.5, 1) * pace.pause())

    def _short(self, name: str) -> list[str]:
        """Which of the semaphores have no room, as far as a look tells; ``name`` where nobody can look."""
        if self._backend.locking != "file":
            return self._short_of(self._ask(room(self.request)))
        # an app's own way to begin may take the write lock, and wait for it for as long as it likes
        short = ShortTransaction(self._engine)
        try:
            short.open(writes=False, wait=self._patient(), within=self._left())
        except PoolTimeout:
            raise
        except LockTimeout:
            self._busy = True
            return [name]
        try:
            return self._short_of(room(self.request).value(short.connection, {}))
        finally:
            short.abandon()

    def _patient(self) -> float:
        """How long to wait for those who are in the middle of something."""
        left = self._left()
        return PATIENCE if left is None or self.patience == 0 else min(PATIENCE, max(left, 0.01))

    def _try(self, request: Operation[Any]) -> Grant | None:
        """Try once; ``None`` when others were busy with it for too long."""
        patience, self._busy = self._patient(), True
        try:
            with self._lines.alone([("gate", self._where, name) for name in self._permits], patience) as alone:
                if not alone:
                    return None
                self.asked_at = clock()
                grant = self._decided(self._ask(request.execution_options(locks_wait=patience)))
                self._busy = False
                return grant
        except PoolTimeout:
            raise
        except LockTimeout:
            return None
        except DBAPIError as error:
            # several who ask with one id can go on deadlocking in InnoDB: that is being busy, too
            if error.connection_invalidated or not self._passing(error):
                raise
            return None

    def _ask(self, operation: Operation[Any]) -> Any:
        """Run it in a transaction of its own, on a connection that is waited for no longer than for the whole."""
        return self._settled(operation.execution_options(locks_checkout=self._left()))

    def _passing(self, error: DBAPIError) -> bool:
        backend = backend_for(self._engine.dialect)
        return backend.transient(error) or backend.statement_interrupted(error)

    def _decided(self, grant: Grant) -> Grant:
        """
        :raises RequestOver: when it was granted before, and is over.
        """
        if grant.replayed and not grant.acquired:
            raise RequestOver(
                f"the request {grant.external_id!r} was granted before and is {grant.state}: it is never "
                "granted again, so ask with another external_id",
                grant.state,
            )
        self._unanswered = False
        return grant

    def _short_of(self, rows: Any) -> list[str]:
        self._busy = False
        rows = list(rows)
        self._beyond = {row.name for row in rows if row.capacity and row.capacity < self._permits[row.name]}
        for row in rows:
            mine = self._own.get(row.name)
            if mine and row.capacity is not None and mine + self._permits[row.name] > row.capacity:
                raise ReentryError(
                    f"this thread or task holds {mine} of {row.capacity} permits of {row.name!r} already: waiting for "
                    f"{self._permits[row.name]} more would be waiting for itself"
                )
        return short_of(rows, self._permits)

    def _shortest(self) -> float:
        left = self._left()
        return math.inf if left is None else left

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _pause(self, name: str, pause: float) -> None:
        left = self._left()
        if left == 0:
            raise self._timed_out(name)
        self._sleep(pause if left is None else min(pause, left))

    def _timed_out(self, *names: str) -> LockTimeout:
        within = "at the only try" if self.patience == 0 else f"within {self.patience:g} s"
        if self._busy:
            wanted = ", ".join(map(repr, self._permits))
            return LockTimeout(
                f"others were busy with {wanted}, or with this very request, {within}: whether there is room "
                "isn't known"
            )
        self.lacking = names
        return LockTimeout(f"{', '.join(map(repr, names))} had no room {within}")

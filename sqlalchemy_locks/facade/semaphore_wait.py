"""Waiting for room in semaphores.

A request is tried immediately, in one round trip where the engine has functions, and denied while others queue. Then
it waits behind those of its own process; the first of each process waits for the head of the queue that the server
keeps. The request at the head polls without a lock, and acquires when there is room. Where the server keeps no queue,
the first of each process polls, after random pauses.

Queues are for fairness alone: whether there is room is decided by the acquire and by nothing else. A caller that holds
permits of the semaphore already doesn't queue: the request at the head may be waiting for those.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks import semaphore
from sqlalchemy_locks.core.engine_state import backend_of
from sqlalchemy_locks.core.operation import Operation, fresh_nonce
from sqlalchemy_locks.dialects import Backend
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import has_room
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockTimeout,
    OutcomeUnknown,
    PoolTimeout,
    ReentryError,
    RequestHeld,
    RequestOver,
    UnknownSemaphore,
)
from sqlalchemy_locks.facade.permit_runner import ROW_TIMEOUT, PermitRunner
from sqlalchemy_locks.facade.server_queue import ServerQueue
from sqlalchemy_locks.keys import key
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.backoff import Backoff
from sqlalchemy_locks.runtime.local_queue import local_queues
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.semaphore.acquire import in_turn
from sqlalchemy_locks.semaphore.availability import availability, exhausted_in
from sqlalchemy_locks.semaphore.release import forget, withdraw
from sqlalchemy_locks.values import Grant, PermitHolder

_NOTHING: Mapping[str, int] = {}

queue_key = lru_cache(1024)(key)


class SemaphoreWaiter:
    """One request, until it is granted.

    :param request: the operation that acquires.
    :param timeout: the longest wait in seconds; ``None`` for no limit, 0 for one attempt.
    :param kind: what events call the block that is about to be entered; ``None`` without a block.
    :param known: the caller has given the id: the request may have been granted before, and must not queue then.
    :param held: how many permits of each semaphore the caller holds, and can't release while it waits.
    """

    def __init__(
        self,
        runner: PermitRunner,
        request: Operation[Any],
        timeout: float | None,
        *,
        kind: str | None = None,
        known: bool = False,
        held: Mapping[str, int] = _NOTHING,
    ) -> None:
        self._runner, self._request, self._timeout = runner, request, timeout
        self._kind, self._known, self._held = kind, known, held
        self._began = time.monotonic()
        #: of every attempt, so that one recognizes what an earlier one was granted
        self._nonce = fresh_nonce()
        #: the semaphores without room, by the last answer; ``None`` while others have kept the rows locked
        self._exhausted: Sequence[str] | None = None
        #: the semaphores whose whole capacity, unless it is 0, is less than what is asked for, with it
        self._beyond: dict[str, int] = {}
        #: the reply to a COMMIT of the grant was lost, and no attempt has been answered since
        self._unanswered = False
        #: the reply to some attempt was lost, which may still reach the server
        self._late_attempt = False
        #: when what was granted was asked for, by :func:`clock`
        self.asked_at = 0.0

    @property
    def _permits(self) -> dict[str, int]:
        permits: dict[str, int] = self._request._values["permits"]
        return permits

    @property
    def _backend(self) -> Backend:
        return backend_of(self._runner.engine.dialect)

    def wait(self) -> Grant:
        """Wait until the request is granted.

        :raises LockTimeout: :raises RequestHeld: :raises RequestOver: :raises ReentryError: as ``Locks.semaphore``.
        """
        asked, locks = self._request._values, self._runner.locks
        ident, kind = asked["external_id"], self._kind or "semaphore"
        labels = {"owner": asked["owner"], "external_id": ident}
        hint = f"its external_id is {ident!r}: ask again with it, or release it"
        if self._backend.single_writer:
            reentry.refuse_write(self._runner.engine)  # before it waits behind others, which wait for this caller
        try:
            grant = self._wait()
            if grant.replayed and self._kind is not None:
                # its holder is another caller: it must not be released here
                raise RequestHeld(f"the request {ident!r} is held by another caller")
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error}; {hint}") from error
        except (UnknownSemaphore, IdempotencyConflict, RequestHeld, RequestOver):
            raise
        except BaseException as error:
            if self._unanswered and isinstance(error, Exception):
                raise OutcomeUnknown(
                    f"{self._request.name}: a reply was lost, and what followed failed: it was done, or not; {hint}"
                ) from error
            if (self._kind is not None or not self._known) and (self._late_attempt or not isinstance(error, Exception)):
                # cancelled or interrupted, perhaps after it was granted, or an attempt may reach the server only now:
                # nobody else knows the id, or may enter with it, though this block did not begin
                undo = forget(ident, self._nonce) if self._known else withdraw(ident)
                # a caller that isn't cancelled doesn't wait for long
                run = partial(self._runner.run, wait=ROW_TIMEOUT if isinstance(error, Exception) else None)
                with contextlib.suppress(Exception):
                    self._runner.shield(run, undo)
            if isinstance(error, LockTimeout):
                # a single attempt is to be cheap: it doesn't ask for the holders
                holders = self._permit_holders() if self._timeout else ()
                error.kind = kind
                late = LockTimeout(str(error), holders, kind) if holders else error
                waited = time.monotonic() - self._began
                locks._emit("waited", kind, asked["permits"], waited=waited, error=late, **labels)
                if late is not error:
                    raise late from error
            raise
        if locks._has_listeners:
            waited = time.monotonic() - self._began
            try:
                locks._emit("waited", kind, grant.permits, waited=waited, **labels)
                # timed for blocks only: other permits may be released by another process
                timed = waited if self._kind else None
                locks._emit("acquired", kind, grant.permits, waited=timed, fence=grant.fence, **labels)
            except BaseException:
                if not self._known:
                    with contextlib.suppress(Exception):  # only this caller knows the id
                        self._runner.shield(self._runner.run, semaphore.release(ident))
                raise
        return grant

    def _wait(self) -> Grant:
        # a request that may be granted already must not queue, and neither must one whose caller holds permits
        name = None if self._known or self._held or self._timeout == 0 else self._queued_here()
        if name is None:
            ordered = self._backend.shortest_queue_wait is not None and not self._held
            request = in_turn(self._request, self._queue_keys()) if ordered else self._request
            grant = self._try(request)
            if grant is not None and grant.acquired:
                return grant
            name = next(iter(self._permits if grant is None else grant.exhausted))
            if self._timeout == 0:
                raise self._timed_out()
        if self._held:
            self._look()  # raises where waiting would deadlock
        while True:
            outcome = self._wait_for(name)
            if isinstance(outcome, Grant):
                return outcome
            name = outcome
            if self._left() == 0:
                raise self._timed_out()

    def _queue_keys(self) -> list[int]:
        """Return the keys of the server's queues; semaphores of another schema or prefix have others."""
        where = self._runner.installation
        return [queue_key("sqlalchemy_locks.semaphore", where, name) for name in self._permits]

    def _queued_here(self) -> str | None:
        """Return the first of the semaphores that others of this process wait for."""
        queues, where = local_queues(self._runner.engine.dialect), self._runner.installation
        occupied = queues.first_occupied([("queue", where, name) for name in self._permits])
        if occupied is None:
            return None
        name: str = occupied[-1]
        self._exhausted = [name]
        return name

    def _wait_for(self, name: str) -> Grant | str:
        """Wait for room in a semaphore; return the grant, or which semaphore to wait for instead."""
        # to queue with more than the capacity would keep all others waiting
        if self._held or name in self._beyond:
            return self._poll(name, queued=False)
        queues = local_queues(self._runner.engine.dialect)
        ticket = queues.ticket(("queue", self._runner.installation, name))
        try:
            if not ticket.wait(self._left()):
                raise self._timed_out()
            with queues.spare_connection(self._runner.engine.pool) as spare:
                outcome = self._wait_at_head(name) if spare else None
                return self._poll(name) if outcome is None else outcome
        finally:
            ticket.leave()

    def _wait_at_head(self, name: str) -> Grant | str | None:
        """As :meth:`_wait_for`, at the head of the server's queue; ``None`` where there is none, or no time for it."""
        queue_keys = dict(zip(self._permits, self._queue_keys(), strict=True))
        backoff = Backoff(0.01)
        shortest = self._backend.shortest_queue_wait
        while shortest is not None and self._at_most(float("inf")) > shortest:
            try:
                with ServerQueue(self._runner.engine, queue_keys[name]) as queue:
                    return self._poll(name, queue) if queue.join(self._left()) else None
            except PoolTimeout:
                raise
            except LockTimeout as error:
                if self._left() == 0:
                    raise self._timed_out() from error
            except DBAPIError as error:
                if not (error.connection_invalidated or self._is_transient(error)):
                    raise
            except DriverTimeout:
                pass
            if self._unanswered:
                # disconnected, perhaps after the grant, which must not queue
                grant = self._try(self._request)
                if grant is not None and grant.acquired:
                    return grant
            self._pause(backoff)
        return None

    def _poll(self, name: str, queue: ServerQueue | None = None, *, queued: bool = True) -> Grant | str:
        """As :meth:`_wait_for`, by looking again and again whether there is room.

        :param queue: whose head this request has reached; without it, no connection is kept between two polls.
        :param queued: in a queue, in memory at least; ends when what is asked for exceeds the capacity.
        """
        # among waiters without an order, one that polls less than those that came after it is served less
        backoff = Backoff(0.01, 0.002) if queue is None else Backoff(0.0003)
        while True:
            exhausted = self._look(queue)
            if exhausted is not None and not exhausted:
                grant = self._try(self._request) if queue is None else self._acquire_at_head(queue)
                if grant is not None and grant.acquired:
                    return grant
                exhausted = None if grant is None else grant.exhausted
            if exhausted is not None and name not in exhausted:
                return exhausted[0]
            if not self._held and queued is (name in self._beyond):
                return name  # the capacity was changed, or is known now: decide again whether to queue
            self._pause(backoff)

    def _look(self, queue: ServerQueue | None = None) -> Sequence[str] | None:
        """Return which of the semaphores have no room, by a plain read; ``None`` where that was locked out.

        :raises ReentryError: when waiting for it would deadlock with what the caller holds.
        """
        operation = availability(self._request)
        if queue is None:
            # on SQLite, an app's own way to begin may take the write lock, and wait for it for as long as it likes
            short, wait = self._backend.single_writer, self._row_timeout()
            try:
                rows = list(self._runner.locks._run(operation, short=short, wait=wait))
            except PoolTimeout:
                raise
            except LockTimeout:
                self._exhausted = None
                return None
        else:
            rows = list(queue.run(operation, {}))
        self._note_capacities({row.name: row.capacity for row in rows})
        for row in rows:
            held = self._held.get(row.name)
            if held and row.capacity is not None and held + self._permits[row.name] > row.capacity:
                raise ReentryError(
                    f"this thread or task holds {held} of {row.capacity} permits of {row.name!r} already: waiting for "
                    f"{self._permits[row.name]} more would deadlock"
                )
        self._exhausted = exhausted_in(rows, self._permits)
        return self._exhausted

    def _try(self, request: Operation[Any]) -> Grant | None:
        """Attempt to acquire once; ``None`` when others kept the rows locked for too long."""
        timeout, self._exhausted = self._row_timeout(), None
        deadline = time.monotonic() + timeout
        queues, where = local_queues(self._runner.engine.dialect), self._runner.installation
        try:
            with contextlib.ExitStack() as tickets:
                # one thread or task of this process at a time: the others would keep connections waiting for the row
                for name in self._permits:
                    ticket = queues.ticket(("rows", where, name))
                    tickets.callback(ticket.leave)
                    if not ticket.wait(max(0.0, deadline - time.monotonic())):
                        return None
                self._note_attempt()
                note = self._note_late_attempt
                return self._answered(self._runner.run(request, self._nonce, wait=timeout, on_lost=note))
        except PoolTimeout:
            raise
        except LockTimeout:
            return None
        except DBAPIError as error:
            # several callers with one id can deadlock repeatedly in InnoDB
            if error.connection_invalidated or not self._is_transient(error):
                raise
            return None

    def _acquire_at_head(self, queue: ServerQueue) -> Grant:
        """Attempt to acquire once, on the connection that is in the server's queue."""
        self._note_attempt()
        self._exhausted = None
        options = {"locks_nonce": self._nonce, "locks_wait": self._row_timeout()}
        grant = self._answered(queue.acquire(self._request, options))
        if grant.acquired:
            self._unanswered = True
            try:
                queue.commit()
            except DBAPIError as error:
                self._unanswered = error.connection_invalidated
                raise
        return grant

    def _answered(self, grant: Grant) -> Grant:
        """Return the grant. :raises RequestOver: when the request was granted before, and its grant has ended."""
        if grant.replayed and not grant.acquired:
            raise RequestOver(
                f"the request {grant.external_id!r} was granted before and is {grant.state}: it is never "
                "granted again, so ask with another external_id",
                grant.state,
            )
        self._unanswered, self._exhausted = False, grant.exhausted
        return grant

    def _note_capacities(self, capacities: Mapping[str, int | None]) -> None:
        self._beyond = {name: size for name, size in capacities.items() if size and size < self._permits[name]}

    def _note_late_attempt(self) -> None:
        self._late_attempt = True

    def _note_attempt(self) -> None:
        # an unanswered attempt may have been granted, or be granted late: its time to live began then
        if not (self._unanswered or self._late_attempt):
            self.asked_at = clock()

    def _is_transient(self, error: DBAPIError) -> bool:
        return self._backend.transient(error) or self._backend.meaning(error) == "interrupted"

    def _left(self) -> float | None:
        """Return the seconds until the timeout; ``None`` without one."""
        return None if self._timeout is None else max(0.0, self._began + self._timeout - time.monotonic())

    def _at_most(self, longest: float) -> float:
        remaining = self._left()
        return longest if remaining is None else min(longest, remaining)

    def _row_timeout(self) -> float:
        return ROW_TIMEOUT if self._timeout == 0 else max(0.01, self._at_most(ROW_TIMEOUT))

    def _pause(self, backoff: Backoff) -> None:
        if self._left() == 0:
            raise self._timed_out()
        self._runner.locks._sleep(self._at_most(backoff.pause()))

    def _timed_out(self) -> LockTimeout:
        within = "(timeout=0)" if self._timeout == 0 else f"within {self._timeout:g} s"
        if not self._exhausted:
            wanted = ", ".join(map(repr, self._permits))
            return LockTimeout(
                f"{wanted}, or the request itself, stayed locked by others {within}: whether there is room is unknown"
            )
        too_many = "".join(
            f"; {self._permits[name]} permits of {name!r} were asked for, and its capacity is {self._beyond[name]}"
            for name in self._exhausted
            if name in self._beyond
        )
        return LockTimeout(f"{', '.join(map(repr, self._exhausted))} had no room {within}{too_many}")

    def _permit_holders(self) -> tuple[PermitHolder, ...]:
        """Return who holds the permits that were not available; empty where that can't be read immediately."""
        if not has_room(self._runner.engine):
            return ()
        holders: list[PermitHolder] = []
        with contextlib.suppress(Exception):
            short = ShortTransaction(self._runner.engine)
            short.open(writes=False, wait=0)
            with short:
                for name in self._exhausted or ():
                    holders += _holders_of(name, short.connection.execute(semaphore.holders(name)))
        return tuple(holders)


def _holders_of(name: str, rows: Iterable[Any]) -> list[PermitHolder]:
    return [
        PermitHolder(
            name=name,
            owner=row.owner,
            since=row.since,
            external_id=row.external_id,
            permits=row.permits,
            expires_at=row.expires_at,
        )
        for row in rows
        if not row.expired
    ]

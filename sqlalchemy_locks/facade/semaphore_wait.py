"""Waiting for room in semaphores, in FIFO order.

A request is tried immediately, in one round trip where the engine has functions, unless others wait already. One that
is denied queues: in memory behind those of its own process, and then, the first of each process, in the queue that the
server keeps. The one at the head polls without a lock, and acquires when there is room; the others cost little.

Queues are for fairness alone. Whether there is room is decided by the acquire and by nothing else, and a request that
has queued for a minute is tried regardless of its position, so that it depends on no other process. A caller that holds
permits of the semaphore already doesn't queue: the request at the head may be waiting for those.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks import semaphore
from sqlalchemy_locks.core.operation import Execution, Operation, fresh_nonce
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.dialects.connections import connect, has_room
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
from sqlalchemy_locks.facade.server_queue import QUEUE_TIMEOUT, ServerQueue
from sqlalchemy_locks.keys import key
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.backoff import Backoff
from sqlalchemy_locks.runtime.local_queue import local_queues
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.semaphore.acquire import acquire_if_room, acquire_in_turn
from sqlalchemy_locks.semaphore.availability import availability, exhausted_in
from sqlalchemy_locks.semaphore.release import adopt, forget, forget_expired, withdraw
from sqlalchemy_locks.values import Grant, PermitHolder

if TYPE_CHECKING:
    from sqlalchemy_locks.facade.semaphores import Semaphores

#: the longest wait for the rows of a semaphore or a request, and for the queue in memory before them, in seconds
ROW_TIMEOUT = 5.0
#: how often a request that was granted before is asked for without a pause, while others end it or have it locked
_ROUNDS = 3
_NOTHING: Mapping[str, int] = {}

queue_key = lru_cache(1024)(key)


class SemaphoreWaiter:
    """One request, until it is granted.

    :param request: the operation that acquires.
    :param timeout: the longest wait in seconds; ``None`` for no limit, 0 for one attempt.
    :param kind: what events call the block that is about to be entered; ``None`` without a block.
    :param known: the caller has given the id: the request may have been granted before, and must not queue then.
    :param held: how many permits of each semaphore the caller holds, and can't release while it waits.
    :param resume: a block enters with what was granted before, too.
    :param reclaim: forget an earlier request of this id whose time ran out.
    """

    def __init__(
        self,
        semaphores: Semaphores,
        request: Operation[Any],
        timeout: float | None,
        *,
        kind: str | None = None,
        known: bool = False,
        held: Mapping[str, int] = _NOTHING,
        resume: bool = True,
        reclaim: bool = False,
    ) -> None:
        self._semaphores, self._engine = semaphores, semaphores.engine
        self._request, self._timeout = request, timeout
        self._kind, self._known, self._held = kind, known, held
        self._resume, self._reclaim = resume, reclaim
        self._permits: dict[str, int] = request._values["permits"]
        self._began = time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self._backend = backend_for(self._engine.dialect)
        self._queues = local_queues(self._engine.dialect)
        #: semaphores of another schema or prefix have other queues
        self.installation = semaphores.installation
        self._keys = {name: queue_key("sqlalchemy_locks.semaphore", self.installation, name) for name in self._permits}
        #: the last attempt ended without an answer, since others had the rows locked
        self._busy = False
        #: the reply to a COMMIT of the grant was lost, and no attempt has been answered since
        self._unanswered = False
        #: the reply to some attempt was lost, which may still reach the server
        self._late_attempt = False
        #: the semaphores whose whole capacity, unless it is 0, is less than what is asked for, with it
        self._beyond: dict[str, int] = {}
        #: the semaphores that had no room when the wait timed out
        self._exhausted: tuple[str, ...] = ()
        #: of every attempt, so that one recognizes what an earlier one was granted
        self._nonce = fresh_nonce()
        #: when what was granted was asked for, by :func:`clock`
        self.asked_at = 0.0

    def wait(self) -> Grant:
        """Wait until the request is granted.

        :raises LockTimeout: :raises RequestHeld: :raises RequestOver: :raises ReentryError: as ``Locks.semaphore``.
        """
        asked, locks = self._request._values, self._semaphores.locks
        ident, kind = asked["external_id"], self._kind or "semaphore"
        labels = {"owner": asked["owner"], "external_id": ident}
        hint = f"its external_id is {ident!r}: ask again with it, or release it"
        if self._backend.single_writer:
            reentry.refuse_write(self._engine)  # before it waits behind others, which wait for this caller
        rounds = 0
        try:
            while True:
                try:
                    grant = self._wait()
                    if grant.replayed and not self._resume:
                        # it may be held by the first caller: it must not be released here
                        raise RequestHeld(f"the request {ident!r} was granted before, and is held")
                    # a block decides itself whether it resumes a request
                    taken = self._take_over(grant) if grant.replayed and self._kind is None else grant
                    if taken is not None:
                        grant = taken
                        break
                    rounds += 1
                    if rounds > _ROUNDS:
                        self._pause(next(iter(self._permits)), random.uniform(0, 0.05))
                except RequestOver:
                    # of several that reclaim it, and then ask, one is granted
                    if not self._reclaim or not self._forget_expired():
                        raise
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error}; {hint}") from error
        except (UnknownSemaphore, IdempotencyConflict, RequestHeld, RequestOver):
            raise
        except BaseException as error:
            if self._unanswered and isinstance(error, Exception):
                raise OutcomeUnknown(
                    f"{self._request.name}: a reply was lost, and what followed failed: it was done, or not; {hint}"
                ) from error
            if not (self._known and self._resume) and (self._late_attempt or not isinstance(error, Exception)):
                # cancelled or interrupted, perhaps after it was granted, or an attempt may reach the server only now:
                # nobody else knows the id, or may enter with it, though this block did not begin
                undo = forget(ident, self._nonce) if self._known else withdraw(ident)
                # a caller that isn't cancelled doesn't wait for long
                run = partial(self._semaphores.run, wait=ROW_TIMEOUT if isinstance(error, Exception) else None)
                with contextlib.suppress(Exception):
                    self._semaphores.shield(run, undo)
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
                        self._semaphores.shield(self._semaphores.run, semaphore.release(ident))
                raise
        return grant

    def _wait(self) -> Grant:
        once = self._timeout == 0
        # a request that may be granted already must not queue, and neither must one whose caller holds permits
        name = None if self._known or self._held else self.queued_semaphore(local=not once)
        if name is None:
            plain = self._held or not self._backend.server_queues
            grant = self._try(self._request if plain else acquire_in_turn(self._request, self._keys))
            if grant is not None and grant.acquired:
                return grant
            if once:
                raise self._timed_out(*(() if grant is None else grant.exhausted))
            name = next(iter(self._permits if grant is None else grant.exhausted))
        elif once:
            raise self._timed_out(name)
        if self._held:
            self._find_exhausted(name)  # raises where waiting would deadlock
        while True:
            # to queue with more than the capacity would keep all others waiting
            unqueued = bool(self._held) or name in self._beyond
            found = self._poll(name, queued=False) if unqueued else self._wait_in_queue(name)
            if isinstance(found, Grant):
                return found
            name = found  # another semaphore is exhausted: the queue of the first one has been left
            if self._left() == 0:
                raise self._timed_out(name)

    def queued_semaphore(self, *, local: bool = True) -> str | None:
        """Return the first of the semaphores that others queue for, as far as that is known without a statement.

        :param local: look at the queues of this process, too.
        """
        if local:
            occupied = self._queues.first_occupied([("queue", self.installation, name) for name in self._permits])
            if occupied is not None:
                name: str = occupied[-1]
                return name
        return None

    def _try(self, request: Operation[Any]) -> Grant | None:
        """Attempt to acquire once; ``None`` when others kept the rows locked for too long."""
        timeout, self._busy = self._row_timeout(), True
        deadline, tickets = time.monotonic() + timeout, []
        try:
            # one thread or task of this process at a time: the others would keep connections waiting for the row
            for name in self._permits:
                ticket = self._queues.ticket(("rows", self.installation, name))
                tickets.append(ticket)
                if not ticket.wait(max(0.0, deadline - time.monotonic())):
                    return None
            self._note_attempt()
            checkout, note = self._left(), self._note_late_attempt
            answer = self._semaphores.run(request, self._nonce, wait=timeout, checkout=checkout, on_lost=note)
            grant = self._refuse_ended(answer)
            self._busy = False
            return grant
        except PoolTimeout:
            raise
        except LockTimeout:
            return None
        except DBAPIError as error:
            # several callers with one id can deadlock repeatedly in InnoDB
            if error.connection_invalidated or not self._is_transient(error):
                raise
            return None
        finally:
            for ticket in tickets:
                ticket.leave()

    def _wait_in_queue(self, name: str) -> Grant | str:
        """Wait in the queue of a semaphore; return the grant, or which other semaphore is exhausted."""
        ticket = self._queues.ticket(("queue", self.installation, name))
        try:
            while not ticket.wait(self._until_deadline(QUEUE_TIMEOUT)):
                if self._left() == 0:
                    raise self._timed_out(name)
                found = self._try_out_of_turn(name)
                if found is not None:
                    return found
            return self._wait_in_front(name)
        finally:
            ticket.leave()

    def _try_out_of_turn(self, name: str) -> Grant | str | None:
        """As :meth:`_wait_in_queue`, without waiting; ``None`` when this semaphore is exhausted or locked."""
        grant = self._try(self._request)
        if grant is None or grant.acquired:
            return grant
        return None if name in grant.exhausted else grant.exhausted[0]

    def _wait_in_front(self, name: str) -> Grant | str:
        """As :meth:`_wait_in_queue`, at the front of this process's queue."""
        with self._queues.spare_connection(self._engine.pool) as spare:
            while (
                spare
                and self._backend.server_queues
                and self._until_deadline(QUEUE_TIMEOUT) > self._backend.min_queue_wait
            ):
                try:
                    with ServerQueue(self._engine, self._keys[name], self._left()) as queue:
                        if not queue.available():
                            break
                        if queue.wait(self._left()):
                            return self._poll_at_head(queue.transaction, name)
                except PoolTimeout:
                    raise
                except LockTimeout as error:
                    if self._left() == 0:
                        raise self._timed_out(name) from error
                except DBAPIError as error:
                    if not (error.connection_invalidated or self._is_transient(error)):
                        raise
                except DriverTimeout:
                    pass
                # its time in the queue has ended, or it was disconnected, perhaps after the grant
                found = self._try_out_of_turn(name)
                if found is not None:
                    return found
                self._pause(name, random.uniform(0, 0.05))
        return self._poll(name, queued=True)

    def _poll_at_head(self, short: ShortTransaction, name: str) -> Grant | str:
        """As :meth:`_wait_in_queue`, at the head of the server's queue, on the connection that is there."""
        backoff = Backoff(0.0003)
        one_call = short.backend.calls_functions
        request = acquire_if_room(self._request) if one_call else self._request
        while True:
            exhausted = []
            if not one_call:
                exhausted = self._exhausted_in(Execution(short.connection, availability(request), {}).value())
            if not exhausted:
                self._note_attempt()
                options, self._busy = {"locks_nonce": self._nonce, "locks_wait": self._row_timeout()}, True
                grant = self._refuse_ended(Execution(short.connection, request, options).value())
                self._busy = False
                if grant.acquired:
                    self._unanswered = True
                    try:
                        short.transaction.commit()
                    except DBAPIError as error:
                        self._unanswered = error.connection_invalidated
                        raise
                    return grant
                exhausted = list(grant.exhausted)
                if grant.capacities:
                    self._note_capacities(dict(zip(grant.permits, grant.capacities, strict=True)))
                if not one_call:
                    # another request was faster; a denial keeps its row locks until the transaction ends
                    short.transaction.rollback()
                    short.transaction, _ = short.backend.begin(short.connection)
            if name not in exhausted:
                return exhausted[0]
            if name in self._beyond:
                return name
            self._pause(name, backoff.pause())

    def _poll(self, name: str, *, queued: bool) -> Grant | str:
        """As :meth:`_wait_in_queue`, without the server's queue, and without a connection between two polls.

        :param queued: in the front of this process's queue; ends when what is asked for exceeds the capacity.
        """
        # the pauses hardly grow: otherwise those that came later would be served more often
        backoff = Backoff(0.01, 0.002)
        while True:
            exhausted = self._find_exhausted(name)
            if not exhausted:
                grant = self._try(self._request)
                if grant is not None and grant.acquired:
                    return grant
                exhausted = [name] if grant is None else list(grant.exhausted)
            if name not in exhausted:
                return exhausted[0]
            if not self._held and queued is (name in self._beyond):
                return name  # the capacity was changed, or is known now: decide again whether to queue
            self._pause(name, random.uniform(0.5, 1) * backoff.pause())

    def _find_exhausted(self, name: str) -> list[str]:
        """Return which of the semaphores have no room, by a plain read; ``name`` where that was locked out."""
        if not self._backend.single_writer:
            return self._exhausted_in(self._semaphores.run(availability(self._request), checkout=self._left()))
        # an app's own way to begin may take the write lock, and wait for it for as long as it likes
        with ShortTransaction(self._engine, connect(self._engine, self._left())) as short:
            try:
                short.begin(writes=False, wait=self._row_timeout())
            except LockTimeout:
                self._busy = True
                return [name]
            return self._exhausted_in(Execution(short.connection, availability(self._request), {}).value())

    def _exhausted_in(self, rows: Any) -> list[str]:
        """Return which of the semaphores have no room.

        :raises ReentryError: when waiting for it would deadlock with what the caller holds.
        """
        self._busy = False
        rows = list(rows)
        self._note_capacities({row.name: row.capacity for row in rows})
        for row in rows:
            held = self._held.get(row.name)
            if held and row.capacity is not None and held + self._permits[row.name] > row.capacity:
                raise ReentryError(
                    f"this thread or task holds {held} of {row.capacity} permits of {row.name!r} already: waiting for "
                    f"{self._permits[row.name]} more would deadlock"
                )
        return exhausted_in(rows, self._permits)

    def _note_capacities(self, capacities: Mapping[str, int | None]) -> None:
        self._beyond = {name: size for name, size in capacities.items() if size and size < self._permits[name]}

    def _note_late_attempt(self) -> None:
        self._late_attempt = True

    def _note_attempt(self) -> None:
        # an unanswered attempt may have been granted: its time to live began then
        if not self._unanswered:
            self.asked_at = clock()

    def _refuse_ended(self, grant: Grant) -> Grant:
        """Return the grant. :raises RequestOver: when the request was granted before, and its grant has ended."""
        if grant.replayed and not grant.acquired:
            raise RequestOver(
                f"the request {grant.external_id!r} was granted before and is {grant.state}: it is never "
                "granted again, so ask with another external_id",
                grant.state,
            )
        self._unanswered = False
        return grant

    def _take_over(self, grant: Grant) -> Grant | None:
        """Become the owner of what was granted before, perhaps to a caller that has crashed since.

        ``None`` when that is to be asked for again: others have the request locked, or it has ended.
        """
        operation = adopt(grant, self._request._values["owner"])
        try:
            taken: Grant | None = self._semaphores.run(operation, wait=self._row_timeout(), checkout=self._left())
            return taken
        except PoolTimeout:
            raise
        except LockTimeout as error:
            self._busy = True
            if self._left() == 0:
                raise self._timed_out() from error
            return None

    def _forget_expired(self) -> bool:
        """Forget an earlier request whose time ran out; return whether to ask again."""
        operation = forget_expired(self._request._values["external_id"])
        try:
            return bool(self._semaphores.run(operation, wait=self._row_timeout(), checkout=self._left()))
        except PoolTimeout:
            raise
        except LockTimeout as error:
            # a guarded write of it is not committed yet
            if self._timeout != 0 and self._left() != 0:
                return True
            self._busy = True
            raise self._timed_out() from error

    def _is_transient(self, error: DBAPIError) -> bool:
        backend = backend_for(self._engine.dialect)
        return backend.transient(error) or backend.statement_interrupted(error)

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _until_deadline(self, longest: float) -> float:
        left = self._left()
        return longest if left is None else min(longest, left)

    def _row_timeout(self) -> float:
        return ROW_TIMEOUT if self._timeout == 0 else max(0.01, self._until_deadline(ROW_TIMEOUT))

    def _pause(self, name: str, pause: float) -> None:
        if self._left() == 0:
            raise self._timed_out(name)
        self._semaphores.locks._sleep(self._until_deadline(pause))

    def _timed_out(self, *names: str) -> LockTimeout:
        within = "(timeout=0)" if self._timeout == 0 else f"within {self._timeout:g} s"
        if self._busy:
            wanted = ", ".join(map(repr, self._permits))
            return LockTimeout(
                f"{wanted}, or the request itself, stayed locked by others {within}: whether there is room is unknown"
            )
        self._exhausted = names
        too_many = "".join(
            f"; {self._permits[name]} permits of {name!r} were asked for, and its capacity is {self._beyond[name]}"
            for name in names
            if name in self._beyond
        )
        return LockTimeout(f"{', '.join(map(repr, names))} had no room {within}{too_many}")

    def _permit_holders(self) -> tuple[PermitHolder, ...]:
        """Return who holds the permits that were not available; empty where that can't be read immediately."""
        found: list[PermitHolder] = []
        if not has_room(self._engine):
            return ()
        with contextlib.suppress(Exception):
            short = ShortTransaction(self._engine)
            short.open(writes=False, wait=0, within=0)
            with short, short.backend.statement_timeout(short.connection):
                for name in self._exhausted:
                    found += [
                        PermitHolder(
                            name=name,
                            owner=row.owner,
                            since=row.since,
                            external_id=row.external_id,
                            permits=row.permits,
                            expires_at=row.expires_at,
                        )
                        for row in short.connection.execute(semaphore.holders(name))
                        if not row.expired
                    ]
        return tuple(found)

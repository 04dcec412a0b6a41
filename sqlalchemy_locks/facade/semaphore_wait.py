"""Waiting for room in semaphores.

A request is tried immediately, in one round trip where the engine has functions, and denied while others queue. Then
it waits behind those of its own process; the first of each process waits for the head of the queue that the server
keeps. The request at the head polls without a lock, and is tried again when there is room. Where the server keeps no
queue, the first of each process polls, after random pauses.

Queues are for fairness alone: whether there is room is decided by the acquire and by nothing else. A caller that holds
permits of the semaphore already doesn't queue: the request at the head may be waiting for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks import semaphore
from sqlalchemy_locks.core.backoff import Backoff
from sqlalchemy_locks.core.operation import Execution, Operation, backend_of, behind_pooler, fresh_nonce, translated
from sqlalchemy_locks.core.transaction import ROW_TIMEOUT, ShortTransaction, connect, has_room
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockTimeout,
    MustRollback,
    OutcomeUnknown,
    PoolTimeout,
    ReentryError,
    RequestHeld,
    RequestOver,
    UnknownSemaphore,
)
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.keys import queue_keys
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.events import log
from sqlalchemy_locks.runtime.local_queue import local_queues
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.semaphore.acquire import in_turn
from sqlalchemy_locks.semaphore.availability import availability, exhausted_in
from sqlalchemy_locks.semaphore.release import forget, withdraw
from sqlalchemy_locks.values import Grant, PermitHolder

_NOTHING: Mapping[str, int] = {}
#: when a wait without a timeout is logged, in seconds
LONG_WAIT = 60.0
#: the longest wait of one statement for the head of the server's queue, in seconds
_LONGEST_JOIN = 86400.0


@contextlib.contextmanager
def _called_after(seconds: float, call: Callable[[], object], engine: Engine) -> Iterator[None]:
    """Call something when the block has taken so long: in a thread, or in a task of the running event loop."""
    timer: threading.Timer | asyncio.TimerHandle
    tasks: list[asyncio.Task[object]] = []
    if engine.dialect.is_async:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, lambda: tasks.append(loop.create_task(greenlet_spawn(call))))
    else:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the system refuses more threads
            timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _BeyondCapacity(LockTimeout):
    """The request exceeds the capacity: no release makes room for it."""


class SemaphoreWaiter:
    """One request, until it is granted.

    :param request: the operation that acquires.
    :param timeout: the longest wait in seconds; ``None`` for no limit, 0 for one attempt.
    :param kind: what events call the block that is about to be entered; ``None`` without a block.
    :param own_id: the id is the caller's: the request may have been granted before.
    :param held: how many permits of each semaphore the caller holds, and can't release while it waits.
    """

    def __init__(
        self,
        locks: LockHost,
        request: Operation[Any],
        timeout: float | None,
        *,
        kind: str | None = None,
        own_id: bool = False,
        held: Mapping[str, int] = _NOTHING,
    ) -> None:
        self._locks, self._request, self._timeout = locks, request, timeout
        self._kind, self._own_id, self._held = kind, own_id, held
        self._permits: dict[str, int] = request._values["permits"]
        self._backend = backend_of(locks._engine.dialect)
        self._queues = local_queues(locks._engine.dialect)
        self._began = time.monotonic()
        #: the same for all attempts: an attempt recognizes the grant of an earlier one by it
        self._nonce = fresh_nonce()
        #: the semaphores without room, by the last answer; ``None`` if there is none, since others keep the rows locked
        self._exhausted: Sequence[str] | None = None
        #: a reply was lost: the server may still execute that attempt
        self._late_attempt = False
        #: when the request for the grant was sent, by :func:`clock`
        self.asked_at = 0.0

    def wait(self) -> Grant:
        """Wait until the request is granted.

        :raises LockTimeout: :raises RequestHeld: :raises RequestOver: :raises ReentryError: as ``Locks.semaphore``.
        """
        ident = self._request._values["external_id"]
        if self._backend.single_writer:
            reentry.refuse_write(self._locks._engine)  # before it waits behind others, which wait for this caller
        try:
            grant = self._wait()
            if grant.replayed and self._kind is not None:
                # its holder is another caller: it must not be released here
                raise RequestHeld(f"the request {ident!r} is held by another caller")
            if self._locks.dispatch.waited or self._locks.dispatch.acquired or self._locks._is_logged():
                waited = time.monotonic() - self._began
                self._emit("waited", waited=waited)
                # timed for blocks only: other permits may be released by another process
                self._emit("acquired", waited=waited if self._kind else None, fence=grant.fence)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error}; its external_id is {ident!r}: ask again with it, or release it") from error
        except (UnknownSemaphore, IdempotencyConflict, RequestHeld, RequestOver):
            raise
        except BaseException as error:
            self._withdraw(error)
            if isinstance(error, LockTimeout):
                self._report_timeout(error)
            raise
        return grant

    def _withdraw(self, error: BaseException) -> None:
        """Withdraw the request if an attempt may be granted, now or later, and nobody would release the grant.

        :param error: the error that has ended the wait.
        """
        cancelled = not isinstance(error, Exception)
        if (self._kind is None and self._own_id) or not (self._late_attempt or cancelled):
            return
        ident = self._request._values["external_id"]
        undo = forget(ident, self._nonce) if self._own_id else withdraw(ident)
        # a caller that isn't cancelled doesn't wait for long
        run = partial(self._locks._run, wait=None if cancelled else ROW_TIMEOUT)
        with contextlib.suppress(Exception):
            self._locks._shield(run, undo)

    def _report_timeout(self, error: LockTimeout) -> None:
        """Emit the event of a wait that ended without a grant. :raises LockTimeout: with the holders."""
        kind = error.kind = self._kind or "semaphore"
        # a single attempt must be cheap: it doesn't ask for the holders
        asks = self._timeout and not isinstance(error, PoolTimeout)
        holders = self._permit_holders(self._exhausted or ()) if asks else ()
        timeout = LockTimeout(str(error), holders, kind) if holders or isinstance(error, _BeyondCapacity) else error
        self._emit("waited", waited=time.monotonic() - self._began, error=timeout)
        if timeout is not error:
            raise timeout from error

    def _emit(self, event: str, **details: Any) -> None:
        values = self._request._values
        details |= {"owner": values["owner"], "external_id": values["external_id"]}
        self._locks._emit(event, self._kind or "semaphore", self._permits, **details)

    def _wait(self) -> Grant:
        ordered = self._backend.server_queues is not None and not self._held
        # the keys of the server's queues: semaphores of another schema or prefix have other keys
        keys = list(queue_keys(self._locks._installation, self._permits))
        grant = self._try(in_turn(self._request, keys) if ordered else self._request)
        if grant is not None:
            return grant
        if self._timeout == 0:
            raise self._timed_out()
        endless = self._timeout is None and log.isEnabledFor(logging.INFO)
        with _called_after(LONG_WAIT, self._log_wait, self._locks._engine) if endless else contextlib.nullcontext():
            while grant is None:
                grant = self._wait_for(next(iter(self._exhausted or self._permits)))
        return grant

    def _log_wait(self) -> None:
        """Log who holds the permits that this request waits for."""
        names = self._exhausted or tuple(self._permits)
        waited = time.monotonic() - self._began
        sentence = f"still waiting for {', '.join(map(repr, names))} after {waited:.0f} s, without a timeout"
        log.info("%s", LockTimeout(sentence, self._permit_holders(names)))

    def _wait_for(self, name: str) -> Grant | None:
        """Wait for room in a semaphore; return ``None`` when it has room, but another one of the request has none."""
        if self._held:
            return self._poll(name)
        ticket = self._queues.ticket(("queue", self._locks._installation, name))
        try:
            if not ticket.wait(self._seconds_left()):
                raise self._timed_out()
            with self._queues.spare_connection(self._locks._engine.pool) as spare:
                return self._wait_at_head(name) if spare else self._poll(name)
        finally:
            ticket.leave()

    def _wait_at_head(self, name: str) -> Grant | None:
        """As :meth:`_wait_for`, at the head of the server's queue where there is one, and time to reach it."""
        (key,) = queue_keys(self._locks._installation, [name])
        backoff = Backoff(0.01)
        queues = self._backend.server_queues
        while queues is not None and self._seconds_left() > queues.shortest_wait:
            try:
                with ServerQueue(self._locks._engine, key, self._locks._after_begin.call) as queue:
                    if queue.join(self._seconds_left()):
                        return self._poll(name, queue)
                break
            except (PoolTimeout, _BeyondCapacity):
                raise
            except LockTimeout as error:
                if self._seconds_left() == 0:
                    raise self._timed_out() from error
            except DBAPIError as error:
                if not (error.connection_invalidated or self._backend.is_conflict(error)):
                    raise
            except (DriverTimeout, MustRollback):
                pass
            self._pause(backoff)
        return self._poll(name)

    def _poll(self, name: str, queue: ServerQueue | None = None) -> Grant | None:
        """As :meth:`_wait_for`, by looking again and again whether there is room.

        :param queue: the queue whose head this request has reached; without one, no connection is kept between polls.
        """
        # without a queue, a waiter that polls less often is served less often: so pauses hardly grow during a wait
        backoff = Backoff(0.01, 0.002) if queue is None else Backoff(0.0003)
        while True:
            self._look(queue)
            if self._exhausted is not None and not self._exhausted:
                grant = self._try(self._request)
                if grant is not None:
                    return grant
            if self._exhausted is not None and name not in self._exhausted:
                return None
            self._pause(backoff)

    def _look(self, queue: ServerQueue | None) -> None:
        """Read which of the semaphores have no room, without a lock.

        :raises ReentryError: when waiting for it would deadlock with what the caller holds.
        :raises LockTimeout: when it asks for more than a capacity, unless that is 0.
        """
        operation = availability(self._request)
        if queue is None:
            # on SQLite, an app's own way to begin may take the write lock, and wait for it for as long as it likes
            short, wait = self._backend.single_writer, self._row_timeout()
            try:
                rows = list(self._locks._run(operation, short=short, wait=wait))
            except PoolTimeout:
                raise
            except LockTimeout:
                self._exhausted = None
                return
        else:
            rows = list(queue.run(operation))
        for row in rows:
            count, held = self._permits[row.name], self._held.get(row.name, 0)
            if row.capacity and count > row.capacity:
                raise _BeyondCapacity(
                    f"{count} permits of {row.name!r} were asked for, and its capacity is {row.capacity}"
                )
            if held and row.capacity is not None and held + count > row.capacity:
                raise ReentryError(
                    f"this thread or task holds {held} of {row.capacity} permits of {row.name!r} already: waiting for "
                    f"{count} more would deadlock"
                )
        self._exhausted = exhausted_in(rows, self._permits)

    def _try(self, request: Operation[Any]) -> Grant | None:
        """Attempt to acquire once; ``None`` when there is no room, or others kept the rows locked for too long.

        :raises RequestOver: when the request was granted before, and its grant has ended.
        """
        timeout, self._exhausted = self._row_timeout(), None
        deadline = time.monotonic() + timeout
        try:
            with contextlib.ExitStack() as tickets:
                # one thread or task of this process at a time: the others would keep connections waiting for the row
                for name in self._permits:
                    ticket = self._queues.ticket(("rows", self._locks._installation, name))
                    tickets.callback(ticket.leave)
                    if not ticket.wait(max(0.0, deadline - time.monotonic())):
                        return None
                # after a lost reply, the earlier attempt may have got the grant, and its time to live began then
                if not self._late_attempt:
                    self.asked_at = clock()
                grant: Grant = self._locks._run(request, self._nonce, wait=timeout, on_reply_lost=self._note_lost_reply)
        except PoolTimeout:
            raise
        except (LockTimeout, MustRollback):  # several callers with one id can deadlock repeatedly in InnoDB
            return None
        except DBAPIError as error:
            if error.connection_invalidated or not self._backend.is_conflict(error):
                raise
            return None
        if grant.replayed and not grant.acquired:
            raise RequestOver(
                f"the request {grant.external_id!r} was granted before and is {grant.state}: it is never "
                "granted again, so ask with another external_id",
                grant.state,
            )
        self._exhausted = grant.exhausted
        return grant if grant.acquired else None

    def _note_lost_reply(self) -> None:
        self._late_attempt = True

    def _seconds_left(self) -> float:
        """Return the seconds until the timeout; infinite without one."""
        return math.inf if self._timeout is None else max(0.0, self._began + self._timeout - time.monotonic())

    def _row_timeout(self) -> float:
        return ROW_TIMEOUT if self._timeout == 0 else max(0.01, min(ROW_TIMEOUT, self._seconds_left()))

    def _pause(self, backoff: Backoff) -> None:
        if self._seconds_left() == 0:
            raise self._timed_out()
        self._locks._sleep(min(backoff.pause(), self._seconds_left()))

    def _timed_out(self) -> LockTimeout:
        within = "(timeout=0)" if self._timeout == 0 else f"within {self._timeout:g} s"
        if not self._exhausted:
            names = ", ".join(map(repr, self._permits))
            return LockTimeout(
                f"{names}, or the request itself, stayed locked by others {within}: whether there is room is unknown"
            )
        return LockTimeout(f"{', '.join(map(repr, self._exhausted))} had no room {within}")

    def _permit_holders(self, names: Iterable[str]) -> tuple[PermitHolder, ...]:
        """Return who holds permits of these semaphores; empty where that can't be read immediately."""
        holders: list[PermitHolder] = []
        with contextlib.suppress(Exception):
            if has_room(self._locks._engine):
                for name in names:
                    holders += _holders_of(name, self._locks._run(semaphore.holders(name), wait=ROW_TIMEOUT))
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


class ServerQueue:
    """One position in the queue of a semaphore that the server keeps, of all processes, in a transaction of its own.

    It is an advisory lock of a transaction on PostgreSQL, and ``GET_LOCK`` on MySQL and MariaDB. A connection that dies
    leaves the queue, and the server ends a connection at the head that is silent for ten seconds.

    :param on_begin: called with the connection when its transaction has begun.
    """

    def __init__(self, engine: Engine, key: int, on_begin: Callable[[Connection], object]) -> None:
        connection = connect(engine)
        self._transaction, self._key, self._joined = ShortTransaction(connection), key, False
        try:
            self._transaction.begin()
            on_begin(connection)
        except BaseException as error:
            self._transaction.abandon(error)
            raise

    def __enter__(self) -> ServerQueue:
        return self

    def join(self, timeout: float) -> bool:
        """Wait for the head of the queue; return whether it was reached, where no error says so.

        ``False`` also on a server without queues, and through a pooler: the waiter would occupy a server connection
        that the holder may need for its release.

        :param timeout: the longest wait in seconds; may be infinite.
        """
        backend, connection = self._transaction.backend, self._transaction.connection
        with translated(backend):
            if backend.server_queues is None or behind_pooler(connection):
                return False
            self._joined = True
            return backend.join_queue(connection, self._key, min(_LONGEST_JOIN, timeout))

    def run(self, operation: Operation[Any]) -> Any:
        """Execute an operation in the transaction, and return its value."""
        return Execution(self._transaction.connection, operation, {}).perform(unpack=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._transaction.connection
        try:
            if self._joined and not connection.invalidated:
                try:
                    self._transaction.backend.leave_queue(connection, self._key)
                except BaseException as raised:
                    # A connection that is still in the queue must not go back to the pool. The grant, or the error of
                    # the block, is not replaced by this one.
                    connection.invalidate()
                    if not isinstance(raised, Exception):
                        raise
        finally:
            self._transaction.abandon(error)

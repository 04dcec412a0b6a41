"""Queues in memory: threads or tasks of one process that want the same key or semaphore wait here in FIFO order.

Correctness comes from the database alone. Without these queues, all of them would wait on connections of the pool, and
the holder could not get one to release with.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Dialect
from sqlalchemy.pool import QueuePool
from sqlalchemy.util import await_only

from sqlalchemy_locks._forks import in_forked_child
from sqlalchemy_locks.core.asyncio_waits import FOREVER, wait_for_future

#: the queues of each engine, by its dialect: copies of an engine with other options share the dialect
_by_dialect: WeakKeyDictionary[Dialect, LocalQueues] = WeakKeyDictionary()


class LocalQueues:
    """The queues of one engine in this process; a queue exists only while it has a ticket in it."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.clear()

    def clear(self) -> None:
        """Forget all tickets in a forked process: their owners are in the parent."""
        self.guard = threading.Lock()
        #: the ticket at the front of each queue
        self.front: dict[Any, Ticket] = {}
        #: connections of the pool that are used for waiting
        self.waiting_connections = 0

    def ticket(self, key: Any) -> Ticket:
        """Return a ticket for the queue of a key; it takes its position with the first :meth:`Ticket.wait`."""
        # a future wakes tasks of its own event loop only
        return Ticket(self, (key, asyncio.get_running_loop() if self.asynchronous else None))

    @contextlib.contextmanager
    def spare_connection(self, pool: Any) -> Iterator[bool]:
        """Count one more waiting connection; yield ``False`` when half of the pool's connections wait already.

        The other half stays available for connections that don't wait, for instance for a holder's release.
        """
        with self.guard:
            limited = isinstance(pool, QueuePool) and pool.size() > 0
            spare = not limited or 2 * (self.waiting_connections + 1) <= pool.size()
            self.waiting_connections += spare
        try:
            yield spare
        finally:
            with self.guard:
                self.waiting_connections -= spare


class Ticket:
    """One position in a queue. Its owner calls :meth:`wait`, and in any case :meth:`leave`."""

    __slots__ = ("behind", "key", "queues", "wake")

    def __init__(self, queues: LocalQueues, key: Any) -> None:
        self.queues, self.key = queues, key
        #: a lock that is released, or a future that is set, when this ticket comes to the front
        self.wake: Any = None
        #: at the front: the tickets behind this one, in their order
        self.behind: deque[Ticket] | None = None

    def wait(self, timeout: float | None) -> bool:
        """Wait until the ticket is at the front. After a timeout it keeps its position, and may wait again.

        :param timeout: in seconds; ``None`` for no limit.
        :return: whether it is at the front.
        """
        queues = self.queues
        if self.wake is None:
            with queues.guard:
                front = queues.front.setdefault(self.key, self)
                if front is self:
                    return True
                if queues.asynchronous:
                    self.wake = asyncio.get_running_loop().create_future()
                else:
                    self.wake = threading.Lock()
                    self.wake.acquire()
                if front.behind is None:
                    front.behind = deque()
                front.behind.append(self)
        if queues.asynchronous:
            return bool(await_only(wait_for_future(self.wake, timeout)))
        woken: bool = self.wake.acquire(timeout=FOREVER if timeout is None else min(FOREVER, max(0.0, timeout)))
        return woken

    def leave(self) -> None:
        """Leave the queue, and wake the next ticket where this one is at the front. A second call does nothing."""
        queues, key = self.queues, self.key
        if self.wake is None and queues.front.get(key) is not self:
            return  # it never waited, or has left
        with queues.guard:
            front = queues.front.get(key)
            if front is self:
                if self.behind:
                    following = self.behind.popleft()
                    following.behind = self.behind
                    queues.front[key] = following
                    # a waiter that was cancelled or timed out, and has not run since, leaves when it runs
                    if queues.asynchronous:
                        following.wake.set_result(None)
                    else:
                        following.wake.release()
                else:
                    del queues.front[key]
            elif front is not None and front.behind and self in front.behind:
                front.behind.remove(self)


def local_queues(dialect: Dialect) -> LocalQueues:
    """Return the queues of an engine, by its dialect: every ``Locks`` on it shares them.

    A forked process has queues of its own.
    """
    # setdefault is one step: threads that call this at the same time get the same queues
    return _by_dialect.get(dialect) or _by_dialect.setdefault(dialect, LocalQueues(dialect.is_async))


@in_forked_child
def _clear_all() -> None:
    for queues in list(_by_dialect.values()):
        queues.clear()

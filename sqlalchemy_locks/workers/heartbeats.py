"""Heartbeats: a thread of each worker says that it is alive, by one UPDATE of the worker's row.

It has a connection of its own, so that nothing delays it: not a fetch that waits, nor a locked table of jobs, nor
handlers that hold all connections of the app's pool or block the event loop.

A worker judges itself before it judges others: if its heartbeats were late, so may theirs have been. It requeues jobs
of silent workers only while its own heartbeats have been in time for ``stalled_after`` seconds, in which every live
worker could send one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.core.operation import fresh_nonce
from sqlalchemy_locks.core.side_pool import SidePool
from sqlalchemy_locks.dialects.base import DriverTimeout
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.queue.liveness import STALLED_AFTER, AddWorker, RemoveWorker, SendHeartbeat
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import WorkerDatabase, log

#: the pause after a heartbeat that failed: the first one in seconds, and the longest as a part of the interval
_FIRST_RETRY, _LONGEST_RETRY = 0.1, 0.25
#: by which part of the interval a heartbeat may be sent early, at random, so that several workers don't send together
_JITTER = 0.1
#: the longest delay of a heartbeat, and the longest time since the one before it, as parts of ``stalled_after``. Beyond
#: them, heartbeats of other workers may have been too late as well: their interval may be half of ``stalled_after``
_LATE, _LONGEST_GAP = 0.25, 0.5
#: the largest change of the server's clock that is ignored, as a part of ``stalled_after``
_CLOCK_SET = 0.25
#: how long a worker that ends waits for a heartbeat under way, and for the deletion of its row, in seconds
_END = 0.5


class Heartbeats:
    """The heartbeats of one run of a worker.

    :param on_lost: called when the worker's row is gone: its jobs have other owners, and the worker has a new host.
    :param on_change: called when jobs may be started again.
    :param on_error: called with a permanent error; heartbeats go on while the worker ends.
    :param loop: that of the app, to which its connections may belong.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        on_lost: Callable[[], object],
        on_change: Callable[[], object],
        on_error: Callable[[BaseException], object],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config = config
        self._on_lost, self._on_change, self._on_error = on_lost, on_change, on_error
        self._loop = loop
        #: ``processing_host``, and the key of the worker's row; each run of a worker has another one
        self.host = self._new_host()
        #: the row is there
        self._added = False
        #: when the last heartbeat was sent that succeeded, by :func:`clock`
        self.confirmed_at = -float("inf")
        #: when the last heartbeat ended, and since when no heartbeat has been late
        self._contact_at = self._contact_since = -float("inf")
        #: how much the server's clock is ahead of :func:`clock`, in seconds
        self._server_ahead: float | None = None
        self._failures = 0
        #: the last heartbeat has failed by an error that is neither the driver's nor the network's
        self._refused = False
        self._wake = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def _new_host(self) -> str:
        return f"{self.config.host}:{fresh_nonce()[:8]}"

    def age(self) -> float:
        """Return how long ago the last heartbeat was sent that succeeded, in seconds."""
        return clock() - self.confirmed_at

    def recent(self) -> bool:
        """Whether jobs may be started: no other worker can have taken them yet."""
        return self.age() <= 2 * self.config.heartbeat

    def may_be_lost(self) -> bool:
        """Whether another worker may have taken the jobs."""
        return self.age() > (self.config.stalled_after or STALLED_AFTER)

    def steady(self) -> bool:
        """Whether other workers may be judged: since contact was made, every live worker could send a heartbeat."""
        stalled_after = self.config.stalled_after
        return stalled_after is not None and self.recent() and clock() - self._contact_since >= stalled_after

    @property
    def knows_clock(self) -> bool:
        """Whether the server's clock was compared with this machine's."""
        return self._server_ahead is not None

    def clock_was_set(self, heartbeat_at: datetime, sent_at: float) -> bool:
        """Compare the server's clock with this machine's; return whether it was set since the last comparison.

        When the clock is set forward, the heartbeats of other workers look older by as much. So this worker judges them
        only after they could have sent another heartbeat.

        :param heartbeat_at: the server's instant of the heartbeat that was sent at ``sent_at``.
        """
        before, self._server_ahead = self._server_ahead, heartbeat_at.timestamp() - sent_at
        step = 0.0 if before is None else self._server_ahead - before
        if abs(step) <= _CLOCK_SET * (self.config.stalled_after or 0.0):
            return False
        log(logging.WARNING, "The server's clock was set by %.0f s: silent workers are looked for later", step)
        self._contact_since = clock()
        return True

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._thread = threading.Thread(target=self._work, name="sqlalchemy_locks.heartbeats", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send no more heartbeats, and delete the worker's row; wait for that for ``_END`` seconds at most."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_END)

    def _work(self) -> None:
        """Run the thread. An async driver runs in an event loop of this thread, which the app's loop can't block."""
        engine = self.config.engine
        side = SidePool(engine)
        database = WorkerDatabase(self.config, side.connect)
        if not engine.dialect.is_async:
            self._repeat(database, lambda call: call())
            side.dispose()
            return
        loop, app = asyncio.new_event_loop(), self._loop
        in_app = False

        def run(call: Callable[[], Any]) -> Any:
            nonlocal in_app
            if in_app and app is not None:
                value = asyncio.run_coroutine_threadsafe(greenlet_spawn(call), app).result()
            else:
                value = loop.run_until_complete(greenlet_spawn(call))
            if not self._added and self._refused:
                # the connections of an async_creator may belong to the app's loop: try both loops in turn
                in_app = not in_app
            return value

        try:
            self._repeat(database, run)
            run(side.dispose)
        finally:
            loop.close()

    def _repeat(self, database: WorkerDatabase, run: Callable[[Callable[[], Any]], Any]) -> None:
        while not self._ended:
            self._wake.clear()
            pause = run(lambda: self.beat(database))
            if not self._ended:
                self._wake.wait(pause)
        run(lambda: self._leave(database))

    def beat(self, database: WorkerDatabase) -> float:
        """Send a heartbeat; return the pause until the next one, in seconds."""
        config, sent_at = self.config, clock()
        recent = self.recent()
        try:
            self._send(database)
        except Exception as error:
            usual = (config.engine.dialect.loaded_dbapi.Error, OSError, DriverTimeout, LockError)
            self._refused = not isinstance(getattr(error, "orig", error), usual)
            if not database.may_pass(error):
                return self._fail(error)
            log(logging.WARNING, "A heartbeat could not be sent: %s", error)
            self._failures += 1
            pause = _FIRST_RETRY * 2 ** min(self._failures - 1, 30)
            return float(min(pause, _LONGEST_RETRY * config.heartbeat))
        except BaseException as error:
            # raised by a listener, for instance: without this, the thread would end silently
            return self._fail(error)
        self._failures = 0
        contact_at = clock()
        stalled_after = config.stalled_after or 0.0
        longest_gap = min(config.heartbeat + _LATE * stalled_after, _LONGEST_GAP * stalled_after)
        if contact_at - self._contact_at > longest_gap:
            self._contact_since = contact_at
        self._contact_at = contact_at
        self.confirmed_at = sent_at
        if not recent:
            self._on_change()
        return max(0.0, sent_at + config.heartbeat * random.uniform(1 - _JITTER, 1) - clock())

    def _send(self, database: WorkerDatabase) -> None:
        queue = self.config.queue
        if not self._added:
            self._add(database)
        # sent even if the row was just added: an earlier INSERT, whose reply was lost, may have added it long ago
        if database.perform(queue._of_worker(SendHeartbeat, self.host)):
            return
        self._added = False
        self.host = self._new_host()
        self._on_lost()
        self._add(database)

    def _add(self, database: WorkerDatabase) -> None:
        database.perform(self.config.queue._of_worker(AddWorker, self.host))
        self._added = True

    def _leave(self, database: WorkerDatabase) -> None:
        try:
            database.perform(self.config.queue._of_worker(RemoveWorker, self.host))
        except Exception as error:
            log(logging.DEBUG, "The row of a worker that has ended stays: %s", error)

    def _fail(self, error: BaseException) -> float:
        self._on_error(error)
        return _LONGEST_RETRY * self.config.heartbeat

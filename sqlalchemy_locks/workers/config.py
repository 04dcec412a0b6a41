"""The parameters of a worker, validated in one place for both kinds of workers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Engine

from sqlalchemy_locks._forks import replace_pool_in_forks, shares_one_connection
from sqlalchemy_locks._validation import bounded_seconds, valid_int, valid_name
from sqlalchemy_locks.dialects import Backend, backend_for
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.queue.queue import Queue

_LONGEST_HEARTBEAT = 3600.0
#: a run appends a nonce, and the column has 255 characters
_LONGEST_HOST = 240
#: how long after the grace a worker may report and release its jobs, in seconds
CLOSE_WITHIN = 3.0
RetryPolicy = float | timedelta | Callable[[int], float | timedelta]


class WorkerConfig:
    """The validated parameters of a worker; :class:`~sqlalchemy_locks.Worker` describes them."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        *,
        name: str,
        concurrency: int,
        batch: int,
        prefetch: int,
        heartbeat: float | timedelta,
        poll: float | timedelta,
        stalled_after: float | timedelta | None,
        grace: float | timedelta,
        retry_in: RetryPolicy | None,
        host: str | None,
    ) -> None:
        if shares_one_connection(engine.pool):
            raise Unsupported(
                f"a worker can't work with a {type(engine.pool).__name__}, which shares one connection between "
                "checkouts: use another pool, and on SQLite a file instead of :memory:"
            )
        replace_pool_in_forks(engine)
        queue._jobs.require_workers()
        self.queue, self.engine = queue, engine
        self.name = valid_name(name, "a queue")
        self.concurrency, self.batch = valid_int(concurrency, "concurrency"), valid_int(batch, "batch")
        self.prefetch = valid_int(prefetch, "prefetch", 0)
        self.heartbeat = bounded_seconds(heartbeat, "heartbeat", zero=False)
        if self.heartbeat > _LONGEST_HEARTBEAT:
            raise ValueError(
                f"heartbeat must be at most {_LONGEST_HEARTBEAT:g} s: a worker that is silent for a day is forgotten"
            )
        self.poll = bounded_seconds(poll, "poll", zero=False)
        self.stalled_after = (
            None if stalled_after is None else bounded_seconds(stalled_after, "stalled_after", zero=False)
        )
        self.grace = bounded_seconds(grace, "grace")
        self._retry_in = retry_in if retry_in is None or callable(retry_in) else bounded_seconds(retry_in, "retry_in")
        if self.stalled_after is not None and self.stalled_after < 2 * self.heartbeat:
            raise ValueError("stalled_after must be at least twice the heartbeat, or jobs of live workers are requeued")
        self._host = None if host is None else valid_name(host, "a host")
        if host is not None and len(host) > _LONGEST_HOST:
            raise ValueError(f"a worker's host has {_LONGEST_HOST} characters at most, and this one has {len(host)}")

    def change(self, *, name: str | None = None, concurrency: int | None = None) -> None:
        """Set the queue's name or the number of handlers, before the worker runs."""
        if name is not None:
            self.name = valid_name(name, "a queue")
        if concurrency is not None:
            self.concurrency = valid_int(concurrency, "concurrency")

    @property
    def backend(self) -> Backend:
        return backend_for(self.engine.dialect)

    @property
    def host(self) -> str:
        """The start of ``processing_host``; computed at each run, since a forked process has another number."""
        return self._host or f"{socket.gethostname()[: _LONGEST_HOST - 20]}:{os.getpid()}"

    def retry_pause(self, attempt: int) -> float | None:
        """Return the pause after an attempt that failed, in seconds: 1 for the first one; ``None``: the default.

        :raises Exception: the error of the app's own policy, or the error about a value that it returned.
        """
        policy = self._retry_in
        return bounded_seconds(policy(attempt), "retry_in") if callable(policy) else policy

    @property
    def requeue_interval(self) -> float:
        """How often stalled jobs are requeued, in seconds."""
        return (self.stalled_after or 3600) / 4

    @property
    def listens(self) -> bool:
        """Whether the worker should listen for new jobs."""
        return self.backend.supports_listen and self.queue.notify


class StopRequest:
    """Whether and when a worker was asked to stop.

    Plain attributes: a signal handler sets them, which must not acquire a lock that the interrupted thread may hold.
    """

    requested = False
    #: by ``time.monotonic()``
    at = float("inf")

    def request(self) -> None:
        if not self.requested:
            self.at = time.monotonic()
            self.requested = True

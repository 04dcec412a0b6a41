"""The parameters of a worker, validated in one place for both kinds of workers."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks._validation import positive_int, seconds, valid_name
from sqlalchemy_locks.dialects import Backend, backend_for
from sqlalchemy_locks.dialects.connections import one_for_all
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.queue.queue import Queue

#: the longest duration, in seconds: what every way of waiting accepts
_YEAR = 366 * 86400.0
#: a run appends a nonce, and the column has 255 characters
_LONGEST_HOST = 240


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
        heartbeat: float | timedelta,
        poll: float | timedelta,
        stalled_after: float | timedelta | None,
        grace: float | timedelta,
        hold: bool,
        host: str | None,
    ) -> None:
        if one_for_all(engine.pool):
            raise Unsupported(
                f"a worker can't work with a {type(engine.pool).__name__}, which shares one connection between "
                "checkouts: use another pool, and on SQLite a file instead of :memory:"
            )
        self.queue, self.engine, self.hold = queue, engine, bool(hold)
        self.name = valid_name(name, "a queue")
        self.concurrency, self.batch = positive_int(concurrency, "concurrency"), positive_int(batch, "batch")
        self.heartbeat = _bounded(heartbeat, "heartbeat", zero=False)
        self.poll = _bounded(poll, "poll", zero=False)
        self.stalled_after = None if stalled_after is None else _bounded(stalled_after, "stalled_after", zero=False)
        self.grace = _bounded(grace, "grace")
        if self.stalled_after is not None and self.stalled_after < 2 * self.heartbeat:
            raise ValueError("stalled_after must be at least twice the heartbeat, or jobs of live workers are requeued")
        self._host = None if host is None else valid_name(host, "a host")
        if host is not None and len(host) > _LONGEST_HOST:
            raise ValueError(f"a worker's host has {_LONGEST_HOST} characters at most, and this one has {len(host)}")
        if self.hold and self.backend.single_writer:
            raise Unsupported(
                f"hold=True is refused on {self.backend.name}, where an open transaction that has written blocks every "
                "other writer: leave it out, and a job whose worker died is requeued after stalled_after"
            )

    @property
    def backend(self) -> Backend:
        return backend_for(self.engine.dialect)

    @property
    def host(self) -> str:
        """The start of ``processing_host``; computed at each run, since a forked process has another number."""
        return self._host or f"{socket.gethostname()[: _LONGEST_HOST - 20]}:{os.getpid()}"

    @property
    def sweep_interval(self) -> float:
        """How often stalled jobs are requeued, in seconds."""
        return (self.stalled_after or 3600) / 4

    @property
    def listens(self) -> bool:
        """Whether the worker should listen for new jobs."""
        return self.backend.supports_listen and self.queue.notify


class StopRequest:
    """Whether a worker was told to stop.

    A plain attribute: a signal handler sets it, which must not acquire a lock that the interrupted thread may hold.
    """

    requested = False


def bound_engine(queue: Queue, bind: Any) -> Any:
    """Return the engine that was passed to the worker or to its queue.

    :raises TypeError: without either.
    """
    if not isinstance(queue, Queue):
        raise TypeError(f"a worker takes a Queue, not {queue!r}")
    if bind is None and queue.bind is None:
        raise TypeError(
            "a worker needs an engine: give it to the worker, bind=engine, or to the queue for all of its workers, "
            "Queue(bind=engine)"
        )
    return queue.bind if bind is None else bind


def _bounded(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    given = seconds(value, name, zero=zero)
    if given > _YEAR:
        raise ValueError(f"{name} must be at most a year, not {value!r} seconds")
    return given

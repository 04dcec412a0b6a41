"""How a worker works: what it was told, checked once for every kind of worker."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Generic, TypeVar

from sqlalchemy import Engine

from sqlalchemy_locks._validation import positive_int, seconds, valid_name
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.dialects.connections import one_for_all
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.queue.queue import Queue

#: what every way of waiting can wait, in seconds
_YEAR = 366 * 86400.0
#: with what a run adds to it there is room for it in the column
_LONGEST_HOST = 240


H = TypeVar("H")
B = TypeVar("B")


class WorkerConfig(Generic[H, B]):
    """What both kinds of workers are told; the parameters are those of :class:`~sqlalchemy_locks.Worker`."""

    #: it was told to begin nothing more
    _stopped: bool

    def __init__(
        self,
        queue: Queue,
        handler: H,
        *,
        bind: B | None = None,
        name: str = DEFAULT_QUEUE,
        concurrency: int = 4,
        batch: int = 10,
        heartbeat: float | timedelta = 15,
        poll: float | timedelta = 1,
        stalled_after: float | timedelta | None = 300,
        grace: float | timedelta = 30,
        hold: bool = False,
        host: str | None = None,
    ) -> None:
        self._refuse(handler)
        if not isinstance(queue, Queue):
            raise TypeError(f"a worker takes a Queue, not {queue!r}")
        engine = self._engine_of(self._bound(queue, bind))
        if one_for_all(engine.pool):
            raise Unsupported(
                f"a worker can't work with a {type(engine.pool).__name__}, where who asks again has the same "
                "connection: use another pool, and on SQLite a file instead of :memory:"
            )
        self.queue, self.handler, self.engine, self.hold = queue, handler, engine, bool(hold)
        self.name = valid_name(name, "a queue")
        self.concurrency, self.batch = positive_int(concurrency, "concurrency"), positive_int(batch, "batch")
        self.heartbeat = _bounded(heartbeat, "heartbeat", zero=False)
        self.poll = _bounded(poll, "poll", zero=False)
        self.stalled_after = None if stalled_after is None else _bounded(stalled_after, "stalled_after", zero=False)
        self.grace = _bounded(grace, "grace")
        if self.stalled_after is not None and self.stalled_after < 2 * self.heartbeat:
            raise ValueError(
                "stalled_after must be at least twice the heartbeat, or jobs are taken from workers that are alive"
            )
        self._host = None if host is None else valid_name(host, "a host")
        if host is not None and len(host) > _LONGEST_HOST:
            raise ValueError(f"a worker's host has {_LONGEST_HOST} characters at most, and this one has {len(host)}")
        if self.hold and build_context(engine.dialect, {}).backend.locking == "file":
            raise Unsupported(
                "hold=True is refused on SQLite, where an open transaction that has written keeps everybody else from "
                "writing: leave it out, and a job whose worker died comes back after stalled_after"
            )

        self._prepare()

    def _prepare(self) -> None:
        """Make what stops and wakes this worker."""
        raise NotImplementedError

    def _refuse(self, handler: Any) -> None:
        """:raises TypeError: for what this kind of worker can't call."""
        raise NotImplementedError

    def _engine_of(self, bind: Any) -> Engine:
        """The engine itself. :raises TypeError: for what this kind of worker can't work with."""
        raise NotImplementedError

    @staticmethod
    def _bound(queue: Queue, bind: Any) -> Any:
        if bind is None and queue.bind is None:
            raise TypeError(
                "a worker needs an engine: give it to the worker, bind=engine, or to the queue for all of its workers, "
                "Queue(bind=engine)"
            )
        return queue.bind if bind is None else bind

    @property
    def host(self) -> str:
        """Who works; asked when jobs are captured, since a process that was forked is another."""
        return self._host or f"{socket.gethostname()[: _LONGEST_HOST - 20]}:{os.getpid()}"


def _bounded(value: float | timedelta, name: str, *, zero: bool = True) -> float:
    given = seconds(value, name, zero=zero)
    if given > _YEAR:
        raise ValueError(f"{name} must be at most a year, not {value!r} seconds")
    return given

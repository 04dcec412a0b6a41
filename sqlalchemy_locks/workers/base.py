"""The parameters that both kinds of workers take, and the checks of them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.queue.liveness import STALLED_AFTER
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.workers.config import RetryPolicy, StopRequest, WorkerConfig
from sqlalchemy_locks.workers.events import ObservedWorker
from sqlalchemy_locks.workers.state import WorkerState

H = TypeVar("H", bound=Callable[[Any], object])
B = TypeVar("B")


class BaseWorker(ObservedWorker, Generic[H, B]):
    """A worker; :class:`~sqlalchemy_locks.Worker` describes the parameters."""

    _engine_class: ClassVar[type[Any]]
    _handler_kind: ClassVar[str]

    def __init__(
        self,
        queue: Queue,
        handler: H,
        *,
        bind: B | None = None,
        name: str = DEFAULT_QUEUE,
        concurrency: int = 4,
        batch: int = 10,
        prefetch: int = 0,
        heartbeat: float | timedelta = 15,
        poll: float | timedelta = 1,
        stalled_after: float | timedelta | None = STALLED_AFTER,
        grace: float | timedelta = 30,
        retry_in: RetryPolicy | None = None,
        host: str | None = None,
    ) -> None:
        if not isinstance(queue, Queue):
            raise TypeError(f"a worker takes a Queue, not {queue!r}")
        self._check(handler)
        engine: Any = queue.bind if bind is None else bind
        if engine is None:
            raise TypeError(
                "a worker needs an engine: give it to the worker, bind=engine, or to the queue for all of its workers, "
                "Queue(bind=engine)"
            )
        if not isinstance(engine, self._engine_class):
            raise TypeError(
                f"Worker takes an Engine, and AsyncWorker an AsyncEngine: {type(self).__name__} was given "
                f"{type(engine).__name__}"
            )
        self.handler = handler
        self.config = WorkerConfig(
            queue,
            getattr(engine, "sync_engine", engine),
            name=name,
            concurrency=concurrency,
            batch=batch,
            prefetch=prefetch,
            heartbeat=heartbeat,
            poll=poll,
            stalled_after=stalled_after,
            grace=grace,
            retry_in=retry_in,
            host=host,
        )
        self._stop = StopRequest()
        self._is_running = threading.Lock()
        #: the state of the current run, or of the last one
        self._state: WorkerState | None = None
        self._make_events()

    def _make_events(self) -> None:
        """Make the events that the threads or tasks of a run wait for."""
        raise NotImplementedError

    def _check(self, handler: Any) -> None:
        """:raises TypeError: unless it can be called with one job."""
        if not callable(handler):
            raise TypeError(f"a worker's handler is a {self._handler_kind} of one job, not {handler!r}")
        try:
            signature = inspect.signature(handler)
        except (TypeError, ValueError):
            return  # it is not written in Python
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"a worker's handler is a {self._handler_kind} of one job, and {handler!r} is not: {error}"
            ) from None

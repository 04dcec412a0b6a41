"""Events of workers, for listeners and for metrics.

Listeners are SQLAlchemy's: ``event.listen(worker, "completed", on_event)``. What a listener raises is logged, and
breaks no worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import event
from sqlalchemy.event.registry import EventTarget

from sqlalchemy_locks.runtime.events import add_listener
from sqlalchemy_locks.values import JobEvent
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import log
from sqlalchemy_locks.workers.running_job import RunningJob


class ObservedWorker(EventTarget):
    """The target of listeners: ``Worker`` and ``AsyncWorker``."""


class JobReports:
    """Emits the events of a worker and its jobs.

    :param host: returns its ``processing_host``.
    """

    def __init__(self, worker: ObservedWorker, config: WorkerConfig, host: Callable[[], str]) -> None:
        self._worker, self._config, self._host = worker, config, host

    def emit_job(self, what: str, job: RunningJob, *, error: BaseException | None = None) -> None:
        """Emit an event of one job."""
        if not getattr(self._worker.dispatch, what):
            return
        waited = took = None
        if what == "begun":
            # run_at may be "-infinity", or of a type of the app's that isn't a datetime
            with suppress(Exception):
                waited = max(0.0, (job._value("started_at") - job._value("run_at")).total_seconds())
        elif what != "dead" and job._began_at:
            took = time.monotonic() - job._began_at
        self.emit(
            what,
            external_id=job._value("external_id"),
            attempt=job._value("attempts"),
            waited=waited,
            took=took,
            error=error,
        )

    def emit(self, what: str, **values: Any) -> None:
        """Emit an event. :param values: further attributes of ``JobEvent``."""
        config = self._config
        job_event = JobEvent(event=what, queue=config.name, engine=config.backend.name, host=self._host(), **values)
        for listener in getattr(self._worker.dispatch, what):
            try:
                listener(job_event)
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # that would end a slot
                log(logging.ERROR, "a listener failed at the event: %s", job_event, exc_info=error)


class JobEvents(event.Events[ObservedWorker]):
    """The events of a worker, for SQLAlchemy's own ``event.listen`` and ``event.listens_for``.

    Listeners are plain functions of one :class:`~sqlalchemy_locks.JobEvent`, called in the thread or task in which it
    occurs. They must not block, and can't be coroutines.

    >>> from sqlalchemy import event
    >>> @event.listens_for(worker, "dead")
    ... def on_dead(event: sl.JobEvent) -> None:
    ...     alarm(event.external_id)
    """

    _target_class_doc = "worker"
    _dispatch_target = ObservedWorker

    @classmethod
    def _listen(cls, event_key: Any, **kw: Any) -> None:
        add_listener(event_key, **kw)

    def begun(self, event: JobEvent) -> None:
        """A handler is about to be called; ``waited`` is the queue's latency."""

    def completed(self, event: JobEvent) -> None:
        """A handler has returned."""

    def failed(self, event: JobEvent) -> None:
        """A handler has raised; the job will be tried again, unless ``dead`` follows."""

    def dead(self, event: JobEvent) -> None:
        """A job won't be tried again: that was its last attempt, or it was discarded."""

    def stalled(self, event: JobEvent) -> None:
        """``count`` jobs were requeued, or are dead: their workers have sent no heartbeat."""

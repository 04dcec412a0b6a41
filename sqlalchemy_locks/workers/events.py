"""Events of workers, for listeners and for metrics.

Listeners are SQLAlchemy's: ``event.listen(worker, "completed", on_event)``. What a listener raises is logged, and
breaks no worker. Without listeners an event costs a comparison.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from sqlalchemy import event
from sqlalchemy.event.registry import EventTarget

from sqlalchemy_locks.queue.jobs import Jobs
from sqlalchemy_locks.runtime.events import add_listener
from sqlalchemy_locks.values import JobEvent
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import log
from sqlalchemy_locks.workers.running_job import RunningJob


class ObservedWorker(EventTarget):
    """The target of listeners: ``Worker`` and ``AsyncWorker``."""

    #: it has, or had, a listener
    _listened = False


class JobReports:
    """Emits the events of a worker and its jobs.

    :param host: ``processing_host`` of this run.
    """

    def __init__(self, worker: ObservedWorker, config: WorkerConfig, host: str) -> None:
        self._worker, self._config, self._host = worker, config, host

    @property
    def has_listeners(self) -> bool:
        """Whether there may be a listener; checked before frequent events."""
        return self._worker._listened

    def emit_job(self, what: str, job: Any, *, took: float | None = None, error: BaseException | None = None) -> None:
        """Emit an event of one job, given as its row."""
        if not self._worker._listened:
            return
        jobs: Jobs = self._config.queue._jobs
        waited = None
        if what == "begun":
            began, due = jobs.value(job, "started_at"), jobs.value(job, "run_at")
            # not of "-infinity", nor of an own type that isn't a datetime
            with suppress(Exception):
                waited = max(0.0, (began - due).total_seconds())
        self._emit(
            what,
            external_id=jobs.value(job, "external_id"),
            attempt=jobs.value(job, "attempts"),
            waited=waited,
            took=took,
            error=error,
        )

    def begun(self, job: RunningJob) -> None:
        """Emit ``begun``: a handler is about to be called."""
        if self.has_listeners:
            job._began_at = time.monotonic()
            self.emit_job("begun", job._row)

    def run_time(self, job: RunningJob) -> float | None:
        """Return how long a handler has run, in seconds; ``None`` where nothing listened when it began."""
        return time.monotonic() - job._began_at if job._began_at else None

    def emit_stalled(self, count: int) -> None:
        """Emit the event of jobs that were requeued, which this worker hasn't read."""
        if self._worker._listened:
            self._emit("stalled", count=count)

    def emit_unread(self, error: BaseException) -> None:
        """Emit the event of a dead job whose row can't be read."""
        if self._worker._listened:
            self._emit("dead", error=error)

    def _emit(self, what: str, **values: Any) -> None:
        config = self._config
        job_event = JobEvent(event=what, queue=config.name, engine=config.backend.name, host=self._host, **values)
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
        """A job won't be tried again: that was its last attempt, it was discarded, or it can't be decoded."""

    def stalled(self, event: JobEvent) -> None:
        """``count`` jobs were requeued, or are dead: their workers have sent no heartbeat."""

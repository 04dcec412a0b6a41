"""Spans and metrics of locks and workers for OpenTelemetry (extra ``otel``).

Each wait and each hold is a span, under the span that is current where it happens. Names of locks are attributes of
spans, not of metrics, because there may be one for each invoice.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import event

from sqlalchemy_locks.integrations import missing

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace import Status, StatusCode
except ModuleNotFoundError as error:
    raise missing("otel", error) from error

from sqlalchemy_locks.values import JobEvent, LockEvent

_SCOPE = "sqlalchemy_locks"


class Telemetry:
    """Records the events of locks with a tracer and a meter."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._waits = meter.create_histogram("sqlalchemy_locks.wait.duration", "s", "Waits for locks, acquired or not")
        self._holds = meter.create_histogram("sqlalchemy_locks.hold.duration", "s", "How long locks were held")
        self._held = meter.create_up_down_counter("sqlalchemy_locks.held", "{lock}", "Blocks that hold a lock now")
        self._counters = {
            what: meter.create_counter(f"sqlalchemy_locks.{what}", "{lock}", f"Locks {what}")
            for what in ("acquired", "released", "lost", "retried", "swept")
        }

    def record(self, occurred: LockEvent) -> None:
        """Record one event."""
        attributes: dict[str, Any] = {"lock.kind": occurred.kind, "db.system.name": occurred.engine.lower()}
        details = {
            **attributes,
            "lock.names": [str(name) for name in occurred.names],
            "lock.shared": occurred.shared,
            "lock.owner": occurred.owner,
        }
        if occurred.event == "waited":
            if occurred.waited is not None:
                outcome = "acquired" if occurred.error is None else "timeout"
                self._waits.record(occurred.waited, {**attributes, "lock.outcome": outcome})
                _record_span(self._tracer, f"{occurred.kind} wait", occurred.waited, details, occurred.error)
            return
        self._counters[occurred.event].add(occurred.count or 1 if occurred.event == "swept" else 1, attributes)
        # only blocks are timed: a mutex may be released by another process
        if occurred.event == "acquired" and occurred.waited is not None:
            self._held.add(1, attributes)
        if occurred.event == "released" and occurred.held is not None:
            self._held.add(-1, attributes)
            self._holds.record(occurred.held, attributes)
            _record_span(self._tracer, f"{occurred.kind} hold", occurred.held, details, occurred.error)


def _record_span(
    tracer: trace.Tracer, name: str, seconds: float, attributes: dict[str, Any], error: BaseException | None
) -> None:
    """Record a span that has ended: its outcome is known only then."""
    ended = time.time_ns()
    span = tracer.start_span(name, start_time=ended - int(seconds * 1e9), attributes=attributes)
    if error is not None:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end(ended)


def instrument(
    locks: Any,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Record the events of locks with OpenTelemetry.

    :param locks: ``Locks`` or ``AsyncLocks``; or the class ``sl.Locks``, for all of them. Call it once for each.
    :param tracer_provider: :param meter_provider: by default the global ones.

    >>> from sqlalchemy_locks.integrations import otel
    >>> otel.instrument(locks)
    """
    telemetry = Telemetry(
        trace.get_tracer(_SCOPE, tracer_provider=tracer_provider),
        metrics.get_meter(_SCOPE, meter_provider=meter_provider),
    )
    for what in ("waited", "acquired", "released", "lost", "retried", "swept"):
        event.listen(locks, what, telemetry.record)


class WorkerTelemetry:
    """Records the events of workers with a tracer and a meter: each run of a handler is a span."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._waits = meter.create_histogram(
            "sqlalchemy_locks.job.wait.duration", "s", "From a job's run_at to its capture"
        )
        self._runs = meter.create_histogram("sqlalchemy_locks.job.run.duration", "s", "How long handlers ran")
        self._running = meter.create_up_down_counter("sqlalchemy_locks.jobs.running", "{job}", "Handlers that run now")
        self._counters = {
            what: meter.create_counter(f"sqlalchemy_locks.jobs.{what}", "{job}", f"Jobs {what}")
            for what in ("begun", "completed", "failed", "dead", "stalled")
        }

    def record(self, occurred: JobEvent) -> None:
        """Record one event."""
        attributes: dict[str, Any] = {"job.queue": occurred.queue, "db.system.name": occurred.engine.lower()}
        self._counters[occurred.event].add(occurred.count, attributes)
        if occurred.event == "begun":
            self._running.add(1, attributes)
            if occurred.waited is not None:
                self._waits.record(occurred.waited, attributes)
        elif occurred.took is not None:
            self._running.add(-1, attributes)
            self._runs.record(occurred.took, {**attributes, "job.outcome": occurred.event})
            identity = {"job.id": str(occurred.external_id), "job.attempt": occurred.attempt or 0}
            name = f"job {occurred.queue}"
            _record_span(self._tracer, name, occurred.took, {**attributes, **identity}, occurred.error)


def instrument_worker(
    worker: Any,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Record the events of a worker with OpenTelemetry.

    :param worker: a ``Worker`` or ``AsyncWorker``; or one of these classes, for all of them. Call it once for each.
    :param tracer_provider: :param meter_provider: by default the global ones.

    >>> from sqlalchemy_locks.integrations import otel
    >>> otel.instrument_worker(worker)
    """
    telemetry = WorkerTelemetry(
        trace.get_tracer(_SCOPE, tracer_provider=tracer_provider),
        metrics.get_meter(_SCOPE, meter_provider=meter_provider),
    )
    for what in ("begun", "completed", "failed", "dead", "stalled"):
        event.listen(worker, what, telemetry.record)

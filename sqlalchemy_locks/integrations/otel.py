"""Spans and metrics of locks for OpenTelemetry (extra ``otel``).

A span for each wait and one for each time that a lock was held, under the span that is current where it happens.
Names are attributes of spans only: there may be one for each invoice.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.trace import Status, StatusCode
from sqlalchemy import event

from sqlalchemy_locks.values import LockEvent

_SCOPE = "sqlalchemy_locks"


class Telemetry:
    """Hears of locks, and tells a tracer and a meter."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._waits = meter.create_histogram(
            "sqlalchemy_locks.wait.duration", "s", "Waits for locks, with the lock or in vain"
        )
        self._holds = meter.create_histogram("sqlalchemy_locks.hold.duration", "s", "How long locks were held")
        self._held = meter.create_up_down_counter("sqlalchemy_locks.held", "{lock}", "Blocks that hold a lock now")
        self._counters = {
            what: meter.create_counter(f"sqlalchemy_locks.{what}", "{lock}", f"Locks {what}")
            for what in ("acquired", "released", "lost", "retried", "swept")
        }

    def hear(self, told: LockEvent) -> None:
        """Tell of one event."""
        attributes: dict[str, Any] = {"lock.kind": told.kind, "db.system.name": told.engine.lower()}
        if told.event == "waited":
            if told.waited is not None:
                outcome = "acquired" if told.error is None else "timeout"
                self._waits.record(told.waited, {**attributes, "lock.outcome": outcome})
                self._span("wait", told, told.waited, attributes)
            return
        self._counters[told.event].add(told.count or 1 if told.event == "swept" else 1, attributes)
        # blocks are timed; a mutex may be released by another process
        if told.event == "acquired" and told.waited is not None:
            self._held.add(1, attributes)
        if told.event == "released" and told.held is not None:
            self._held.add(-1, attributes)
            self._holds.record(told.held, attributes)
            self._span("hold", told, told.held, attributes)

    def _span(self, what: str, told: LockEvent, seconds: float, attributes: dict[str, Any]) -> None:
        """A span that is over: what it is about is known only at its end."""
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"{told.kind} {what}",
            start_time=ended - int(seconds * 1e9),
            attributes={
                **attributes,
                "lock.names": [str(name) for name in told.names],
                "lock.shared": told.shared,
                "lock.owner": told.owner,
            },
        )
        if told.error is not None:
            span.record_exception(told.error)
            span.set_status(Status(StatusCode.ERROR, str(told.error)))
        span.end(ended)


def instrument(
    locks: Any,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Tell OpenTelemetry what happens to locks.

    :param locks: ``Locks`` or ``AsyncLocks``, once; or the class ``sl.Locks``, for all of them.
    :param tracer_provider: :param meter_provider: by default those of the process.

    >>> from sqlalchemy_locks.integrations import otel
    >>> otel.instrument(locks)
    """
    told = Telemetry(
        trace.get_tracer(_SCOPE, tracer_provider=tracer_provider),
        metrics.get_meter(_SCOPE, meter_provider=meter_provider),
    )
    for what in ("waited", "acquired", "released", "lost", "retried", "swept"):
        event.listen(locks, what, told.hear)

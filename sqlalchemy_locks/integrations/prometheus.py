"""Metrics of locks and workers for Prometheus (extra ``prometheus``).

The labels are a lock's kind or a worker's queue, and the engine. Names of locks are no labels, because there may be
one for each invoice.
"""

from __future__ import annotations

import functools
from typing import Any

from sqlalchemy import event

from sqlalchemy_locks.integrations import missing

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as error:
    raise missing("prometheus", error) from error

from sqlalchemy_locks.values import JobEvent, LockEvent

_LABELS = ("kind", "engine")
#: seconds
_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one registry, updated by the events of ``Locks`` (see :func:`instrument`).

    - ``sqlalchemy_locks_wait_seconds``: waits, by ``outcome``: ``acquired`` or ``timeout``
    - ``sqlalchemy_locks_hold_seconds``: how long blocks held their locks
    - ``sqlalchemy_locks_held``: blocks that hold a lock now
    - ``sqlalchemy_locks_acquired_total``, ``_released_total``, ``_lost_total``, ``_retried_total``, ``_swept_total``
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waits = Histogram(
            "sqlalchemy_locks_wait_seconds",
            "Waits for locks, acquired or not",
            (*_LABELS, "outcome"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._holds = Histogram(
            "sqlalchemy_locks_hold_seconds", "How long locks were held", _LABELS, buckets=_BUCKETS, registry=registry
        )
        self._held = Gauge(
            "sqlalchemy_locks_held",
            "Blocks that hold a lock now",
            _LABELS,
            registry=registry,
            multiprocess_mode="livesum",
        )
        descriptions = {
            "acquired": "Locks acquired",
            "released": "Locks released",
            "lost": "Locks lost before their holder had finished",
            "retried": "Transactions run again after a transient error",
            "swept": "Abandoned requests that were released",
        }
        self._counters = {
            what: Counter(f"sqlalchemy_locks_{what}", description, _LABELS, registry=registry)
            for what, description in descriptions.items()
        }

    def record(self, occurred: LockEvent) -> None:
        """Record one event."""
        labels = occurred.kind, occurred.engine
        if occurred.event == "waited":
            if occurred.waited is not None:
                outcome = "acquired" if occurred.error is None else "timeout"
                self._waits.labels(*labels, outcome).observe(occurred.waited)
            return
        self._counters[occurred.event].labels(*labels).inc(occurred.count or 1 if occurred.event == "swept" else 1)
        # only blocks are timed: a mutex may be released by another process
        if occurred.event == "acquired" and occurred.waited is not None:
            self._held.labels(*labels).inc()
        if occurred.event == "released" and occurred.held is not None:
            self._held.labels(*labels).dec()
            self._holds.labels(*labels).observe(occurred.held)


#: one ``Metrics`` for each registry, since a registry accepts each name once
_metrics_of = functools.cache(Metrics)


def instrument(locks: Any, registry: CollectorRegistry = REGISTRY) -> None:
    """Record the events of locks in the metrics of a registry.

    :param locks: ``Locks`` or ``AsyncLocks``; or the class ``sl.Locks``, for all of them. Call it once for each.
    :param registry: the registry; by default Prometheus' global one.

    >>> from sqlalchemy_locks.integrations import prometheus
    >>> prometheus.instrument(locks)
    """
    metrics = _metrics_of(registry)
    for what in ("waited", "acquired", "released", "lost", "retried", "swept"):
        event.listen(locks, what, metrics.record)


class WorkerMetrics:
    """The metrics of one registry, updated by the events of workers (see :func:`instrument_worker`).

    - ``sqlalchemy_locks_job_wait_seconds``: from a job's ``run_at`` to its capture
    - ``sqlalchemy_locks_job_run_seconds``: how long handlers ran, by ``outcome``: ``completed`` or ``failed``
    - ``sqlalchemy_locks_jobs_running``: handlers that run now
    - ``sqlalchemy_locks_jobs_begun_total``, and the same for ``completed``, ``failed``, ``dead`` and ``stalled``
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("queue", "engine")
        self._waits = Histogram(
            "sqlalchemy_locks_job_wait_seconds",
            "From a job's run_at to its capture",
            labels,
            buckets=_BUCKETS,
            registry=registry,
        )
        self._runs = Histogram(
            "sqlalchemy_locks_job_run_seconds",
            "How long handlers ran",
            (*labels, "outcome"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._running = Gauge(
            "sqlalchemy_locks_jobs_running",
            "Handlers that run now",
            labels,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._counters = {
            what: Counter(f"sqlalchemy_locks_jobs_{what}", f"Jobs {what}", labels, registry=registry)
            for what in ("begun", "completed", "failed", "dead", "stalled")
        }

    def record(self, occurred: JobEvent) -> None:
        """Record one event."""
        labels = occurred.queue, occurred.engine
        self._counters[occurred.event].labels(*labels).inc(occurred.count)
        if occurred.event == "begun":
            self._running.labels(*labels).inc()
            if occurred.waited is not None:
                self._waits.labels(*labels).observe(occurred.waited)
        elif occurred.took is not None:
            self._running.labels(*labels).dec()
            self._runs.labels(*labels, occurred.event).observe(occurred.took)


_worker_metrics_of = functools.cache(WorkerMetrics)


def instrument_worker(worker: Any, registry: CollectorRegistry = REGISTRY) -> None:
    """Record the events of a worker in the metrics of a registry.

    :param worker: a ``Worker`` or ``AsyncWorker``; or one of these classes, for all of them. Call it once for each.
    :param registry: the registry; by default Prometheus' global one.

    >>> from sqlalchemy_locks.integrations import prometheus
    >>> prometheus.instrument_worker(worker)
    """
    metrics = _worker_metrics_of(registry)
    for what in ("begun", "completed", "failed", "dead", "stalled"):
        event.listen(worker, what, metrics.record)

"""Metrics of locks for Prometheus (extra ``prometheus``).

Labels are the kind of a lock and its engine. Names are no labels: there may be one for each invoice.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from sqlalchemy import event

from sqlalchemy_locks.values import LockEvent

_LABELS = ("kind", "engine")
#: seconds
_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one registry; :func:`instrument` has ``Locks`` feed them.

    - ``sqlalchemy_locks_wait_seconds``: waits, by ``outcome``: ``acquired`` or ``timeout``
    - ``sqlalchemy_locks_hold_seconds``: how long blocks were held
    - ``sqlalchemy_locks_held``: blocks that are held now
    - ``sqlalchemy_locks_acquired_total``, ``_released_total``, ``_lost_total``, ``_retried_total``, ``_swept_total``
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str) -> Counter:
            return Counter(f"sqlalchemy_locks_{name}", what, _LABELS, registry=registry)

        self._waits = Histogram(
            "sqlalchemy_locks_wait_seconds",
            "Waits for locks, with the lock or in vain",
            (*_LABELS, "outcome"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._holds = Histogram(
            "sqlalchemy_locks_hold_seconds",
            "How long locks were held",
            _LABELS,
            buckets=_BUCKETS,
            registry=registry,
        )
        self._held = Gauge("sqlalchemy_locks_held", "Blocks that hold a lock now", _LABELS, registry=registry)
        self._counters = {
            "acquired": counter("acquired", "Locks acquired"),
            "released": counter("released", "Locks released"),
            "lost": counter("lost", "Locks lost before their holder had finished"),
            "retried": counter("retried", "Transactions run again after a transient error"),
            "swept": counter("swept", "Requests released that nobody would give back"),
        }

    def hear(self, told: LockEvent) -> None:
        """Count one event."""
        labels = told.kind, told.engine
        if told.event == "waited":
            if told.waited is not None:
                outcome = "acquired" if told.error is None else "timeout"
                self._waits.labels(*labels, outcome).observe(told.waited)
            return
        self._counters[told.event].labels(*labels).inc(told.count or 1 if told.event == "swept" else 1)
        # blocks are timed; a mutex may be released by another process
        if told.event == "acquired" and told.waited is not None:
            self._held.labels(*labels).inc()
        if told.event == "released" and told.held is not None:
            self._held.labels(*labels).dec()
            self._holds.labels(*labels).observe(told.held)


_made: dict[int, tuple[CollectorRegistry, Metrics]] = {}


def instrument(locks: Any, registry: CollectorRegistry = REGISTRY) -> None:
    """Have the metrics of a registry tell what happens to locks.

    :param locks: ``Locks`` or ``AsyncLocks``, once; or the class ``sl.Locks``, for all of them.
    :param registry: where the metrics are; by default Prometheus' own.

    >>> from sqlalchemy_locks.integrations import prometheus
    >>> prometheus.instrument(locks)
    """
    if id(registry) not in _made:
        _made[id(registry)] = registry, Metrics(registry)
    metrics = _made[id(registry)][1]
    for what in ("waited", "acquired", "released", "lost", "retried", "swept"):
        event.listen(locks, what, metrics.hear)

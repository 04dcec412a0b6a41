"""The metrics of OpenTelemetry and Prometheus, read by their own libraries."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import otel, prometheus
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, later, unused


def two_blocks_and_a_refusal(locks: sl.Locks, key: str) -> None:
    def refused() -> None:
        with pytest.raises(sl.LockTimeout), locks.exclusive(key, timeout=0):
            raise AssertionError("it was had")

    with locks.exclusive(key):
        later(refused).result(PATIENCE)
    with pytest.raises(RuntimeError), locks.shared(key):
        raise RuntimeError("the app's")
    assert locks.mutex.acquire(key)


def test_prometheus(engine_to: MakeEngine) -> None:
    locks, other = sl.Locks(engine_to("postgresql15")), sl.Locks(engine_to("postgresql15"))
    registry = CollectorRegistry()
    for each in (locks, other):  # one set of metrics, however many ``Locks`` are instrumented
        prometheus.instrument(each, registry)
    two_blocks_and_a_refusal(locks, unused())

    def value(name: str, kind: str = "lock", **labels: str) -> Any:
        return registry.get_sample_value(f"sqlalchemy_locks_{name}", {"kind": kind, "engine": "PostgreSQL", **labels})

    assert value("acquired_total") == 2
    assert value("held") == 0
    assert value("wait_seconds_count", outcome="acquired") == 2
    assert value("wait_seconds_count", outcome="timeout") == 1
    assert value("hold_seconds_count") == 2
    assert value("hold_seconds_sum") > 0
    assert value("acquired_total", "mutex") == 1
    with locks.exclusive(unused()):
        assert value("held") == 1
    # blocks only, and none that is refused because it is held already
    name = unused("semaphore")
    locks.run(sl.semaphore.create(name, 2))
    grant = locks.acquire({name: 1}, external_id=unused("id"))
    with pytest.raises(sl.RequestHeld):
        locks.semaphore(name, ttl=3600, external_id=grant.external_id).__enter__()
    assert not value("held", "semaphore")
    with locks.semaphore(name, ttl=3600):
        assert value("held", "semaphore") == 1


def test_opentelemetry(engine_to: MakeEngine) -> None:
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracing, metering = TracerProvider(), MeterProvider([reader])
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    locks, key = sl.Locks(engine_to("postgresql15"), owner="ann"), unused()
    otel.instrument(locks, tracer_provider=tracing, meter_provider=metering)
    try:
        with tracing.get_tracer("app").start_as_current_span("request"):
            two_blocks_and_a_refusal(locks, key)
        done = spans.get_finished_spans()
        names = [span.name for span in done]
        assert names == ["lock wait", "lock wait", "lock hold", "lock wait", "lock hold", "request"]
        request = done[-1]
        mine = [span for span in done[:-1] if span.parent is not None]
        assert len(mine) == 4  # the refused call was in a thread without a span
        for span in mine:
            assert span.parent is not None
            assert span.parent.span_id == request.context.span_id
            assert span.attributes is not None
            assert span.attributes["lock.names"] == (key,)
            assert span.attributes["lock.owner"] == "ann"
            assert span.attributes["db.system.name"] == "postgresql"
            assert span.start_time is not None
            assert span.end_time is not None
            assert span.start_time < span.end_time
        assert [span.status.is_ok for span in done] == [True, False, True, True, False, True]
        metrics_of = reader.get_metrics_data()
        assert metrics_of is not None
        found: dict[str, Any] = {
            metric.name: list(metric.data.data_points)
            for resource in metrics_of.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        assert {point.attributes["lock.kind"]: point.value for point in found["sqlalchemy_locks.acquired"]} == {
            "lock": 2,
            "mutex": 1,
        }
        assert [point.value for point in found["sqlalchemy_locks.held"]] == [0]
        waits = found["sqlalchemy_locks.wait.duration"]
        assert {point.attributes["lock.outcome"]: point.count for point in waits} == {"acquired": 2, "timeout": 1}
        assert [point.count for point in found["sqlalchemy_locks.hold.duration"]] == [2]
    finally:
        tracing.shutdown()
        metering.shutdown()

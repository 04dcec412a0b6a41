"""Whatever watches an app's statements sees all of this library's, without a line of this library's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sentry_sdk
from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.integrations.sqlalchemy import SqlalchemyIntegration
from sentry_sdk.transport import Transport
from sqlalchemy import Connection, Engine, event, text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import unused


class Recorded:
    """The statements that reach psycopg."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        recorded = self.statements

        class RecordingCursor(psycopg.Cursor[Any]):
            def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
                recorded.append(str(query))
                return super().execute(query, *args, **kwargs)

        self.cursor_factory = RecordingCursor


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def engine(engine_to: MakeEngine, recorded: Recorded) -> Engine:
    engine = engine_to("postgresql15", connect_args={"cursor_factory": recorded.cursor_factory})
    with engine.connect():
        recorded.statements.clear()  # those by which SQLAlchemy itself examines the server
    return engine


def use(engine: Engine) -> None:
    """One use of each pattern, in autocommit, in short transactions, in blocks and in the app's own transaction."""
    locks, queue, name = sl.Locks(engine), sl.Queue(), unused()
    with locks.exclusive(name, timeout=5) as held:
        held.session.execute(text("SELECT 42"))
    assert locks.mutex.acquire(name)
    assert locks.mutex.release(name)
    assert locks.once_per(name, every=3600)
    with locks.lease(name, ttl=60):
        pass
    with engine.begin() as connection:
        connection.execute(queue.put({"n": 1}, queue=name))
    jobs = locks.run(queue.capture(1, queue=name))
    assert locks.run(queue.complete(jobs)) == 1


def test_the_cursors_event(engine: Engine, recorded: Recorded) -> None:
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _, cursor, sql, *rest: seen.append(sql))
    use(engine)
    assert seen == recorded.statements


def test_an_echo_and_the_logging_token_of_an_option(
    engine: Engine, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    engine.echo = True
    with caplog.at_level(logging.INFO, "sqlalchemy.engine.Engine"):
        use(engine.execution_options(logging_token="orders"))
    logged = [record.getMessage() for record in caplog.records if record.name == "sqlalchemy.engine.Engine"]
    assert all(f"[orders] {statement}" in logged for statement in recorded.statements)


def test_a_subclassed_connection(engine: Engine, recorded: Recorded) -> None:
    executed: list[Any] = []

    class WatchedConnection(Connection):
        def execute(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(statement, sl.Operation):
                executed.append(statement)
            return super().execute(statement, *args, **kwargs)

    engine._connection_cls = WatchedConnection
    use(engine)
    assert len(executed) == len(recorded.statements)


def test_opentelemetry(engine: Engine, recorded: Recorded) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = SQLAlchemyInstrumentor()
    instrumentor.instrument(engine=engine, tracer_provider=provider, skip_dep_check=True)  # it doesn't know 2.1 yet
    try:
        use(engine)
    finally:
        instrumentor.uninstrument()
    attributes = [span.attributes or {} for span in exporter.get_finished_spans()]
    assert [each["db.statement"] for each in attributes if "db.statement" in each] == recorded.statements


class KeptEnvelopes(Transport):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.envelopes: list[Any] = []

    def capture_envelope(self, envelope: Any) -> None:
        self.envelopes.append(envelope)


@pytest.fixture
def sentry() -> Iterator[KeptEnvelopes]:
    transport = KeptEnvelopes()
    sentry_sdk.init(
        dsn="https://key@sentry.invalid/1",
        traces_sample_rate=1.0,
        transport=transport,
        auto_session_tracking=False,
        enable_backpressure_handling=False,  # its thread, for which the test would wait, sleeps ten seconds
        default_integrations=False,
        integrations=[SqlalchemyIntegration()],
    )
    yield transport
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


def test_sentry(engine: Engine, recorded: Recorded, sentry: KeptEnvelopes) -> None:
    with sentry_sdk.start_transaction(name="request"):
        use(engine)
    sentry_sdk.flush()
    (transaction,) = [envelope.get_transaction_event() for envelope in sentry.envelopes]
    spans = [span["description"] for span in transaction["spans"] if span["op"] == "db"]
    assert spans == recorded.statements

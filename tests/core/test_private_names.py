"""The private names of SQLAlchemy that this library uses: each still exists and has the expected meaning."""

from __future__ import annotations

import functools
import io
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    QueuePool,
    Select,
    Table,
    create_engine,
    event,
    insert,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.sql.base import CompileState
from sqlalchemy.util.queue import Empty

import sqlalchemy_locks
from sqlalchemy_locks.dialects.connections import (
    autobegin,
    begin_failed,
    connect,
    engine_with_own_pool,
    hear_engine,
    on_driver_error,
    on_statement_and_commit,
    return_to_pool,
)
from tests.fixtures.parties import PATIENCE

PACKAGE = pathlib.Path(sqlalchemy_locks.__file__).parent
#: of a Connection, an Engine, a Dialect or a pool, and the only module that uses it
OF_CONNECTIONS = {
    "_handle_dbapi_exception": "dialects/connections.py",
    "_handle_dbapi_exception_noconnection": "dialects/connections.py",
    "_connection_cls": "dialects/connections.py",
    "_connection_record": "dialects/connections.py",
    "_close_special": "dialects/connections.py",
    "_max_overflow": "dialects/connections.py",
    "_do_get": "dialects/connections.py",
    "_create_connection": "dialects/connections.py",
    "_autobegin": "dialects/connections.py",
    "_Connection__in_begin": "dialects/connections.py",
    "_has_events": "dialects/connections.py",
    "_JoinedDispatcher": "dialects/connections.py",
    "_nested_transaction": "dialects/connections.py",
    "_echo": "dialects/connections.py",
    "_commit_impl": "dialects/connections.py",
    "_exec_single_context": "dialects/connections.py",
    "_exec_insertmany_context": "dialects/connections.py",
    "_cursor_execute": "dialects/connections.py",
    "_init_statement": "dialects/connections.py",
    "_invalidate_schema_cache": "dialects/connections.py",
    "_invalidate_schema_cache_asof": "dialects/connections.py",
    "_get_tx_start_command": "dialects/connections.py",
    "_autocommit": "dialects/connections.py",
    "_execute_on_connection": "core/operation.py",
    "_execute_on_scalar": "core/operation.py",
    "_get_plugin_class_for_plugin": "core/operation.py",
    "_effective_plugin_target": "core/operation.py",
    "_autoflush": "core/operation.py",
    "_prepare_impl": "core/operation.py",
    "_register_altered": "core/entities.py",
}


@pytest.mark.parametrize("name", OF_CONNECTIONS)
def test_a_private_name_is_used_in_one_module(name: str) -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(rf"\b{name}\b", path.read_text())
    }
    assert users == {OF_CONNECTIONS[name]}


def test_connection_attributes_exist() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        checked: Any = connection
        assert (checked._nested_transaction, checked._has_events, checked._echo) == (None, False, False)
        assert (checked.engine._has_events, checked.dialect._has_events) == (False, False)
        event.listen(connection, "before_cursor_execute", lambda *_: None)
        assert checked._has_events
        assert checked.connection._connection_record.finalize_callback is not None
        with connection.begin_nested():
            assert checked._nested_transaction is not None
    assert engine._connection_cls is Connection
    assert callable(Connection._handle_dbapi_exception_noconnection)


def test_engine_events_are_seen() -> None:
    engine = create_engine("sqlite://")
    event.listen(engine, "before_cursor_execute", lambda *_: None)
    assert engine._has_events
    with engine.connect() as connection:
        assert connection._has_events or connection.engine._has_events


@pytest.mark.parametrize("place", ["engine", "engine with options", "every engine", "connection"])
def test_a_connection_has_the_listeners_of_its_engine(place: str) -> None:
    """One whose engine has none doesn't join them, which is a sixth of a checkout's time."""
    engine = create_engine("sqlite://")
    heard: list[str] = []

    def listen(*given: Any) -> None:
        heard.append(given[2])

    if place == "every engine":
        event.listen(Engine, "before_cursor_execute", listen)
    elif place != "connection":
        event.listen(engine, "before_cursor_execute", listen)
    with connect(engine.execution_options(other=1) if place == "engine with options" else engine) as connection:
        try:
            if place == "connection":
                event.listen(connection, "before_cursor_execute", listen)
            connection.exec_driver_sql("SELECT 1")
        finally:
            if place == "every engine":
                event.remove(Engine, "before_cursor_execute", listen)
    assert heard == ["SELECT 1"]


def test_a_connection_hears_listeners_that_come_later() -> None:
    engine, heard = create_engine("sqlite://"), []
    with connect(engine) as connection:
        hear_engine(connection)
        event.listen(engine, "before_cursor_execute", lambda *given: heard.append(given[2]))
        connection.exec_driver_sql("SELECT 1")
    assert heard == ["SELECT 1"]


def test_echo_is_seen() -> None:
    engine = create_engine("sqlite://", echo=True)
    with engine.connect() as connection:
        assert connection._echo


def test_a_pool_has_what_a_checkout_overrides() -> None:
    pool: Any = create_engine("sqlite:///x.db", poolclass=QueuePool, max_overflow=3, pool_timeout=7).pool
    assert (pool._max_overflow, pool._timeout) == (3, 7)
    for name in ("_do_get", "_create_connection", "_invalidate"):
        assert callable(getattr(pool, name))
    with pytest.raises(Empty):
        pool._pool.get(False)


def test_app_pool_waits_for_no_other_pool_to_know_its_server(tmp_path: pathlib.Path) -> None:
    """While a second pool makes its first connection, the app's first one finds the server's version out itself."""
    engine: Any = create_engine(f"sqlite:///{tmp_path}/app.db", poolclass=QueuePool)
    initialize, inside, known = engine.dialect.initialize, threading.Event(), threading.Event()

    def initialize_in_turn(connection: Connection) -> None:
        if threading.current_thread() is heartbeat:
            inside.set()
            assert known.wait(PATIENCE)
        initialize(connection)

    engine.dialect.initialize = initialize_in_turn
    event.listen(engine, "connect", functools.partial(print, file=io.StringIO()))
    event.listen(engine, "connect", lambda *_: None, once=True)
    own = engine_with_own_pool(engine)
    heartbeat = threading.Thread(target=lambda: own.connect().close())
    heartbeat.start()
    assert inside.wait(PATIENCE)
    with engine.connect() as connection:
        version = getattr(connection.dialect, "server_version_info", None)
    known.set()
    heartbeat.join(PATIENCE)
    own.dispose()
    assert version is not None


def test_errors_are_heard_before_sqlalchemy_handles_them() -> None:
    heard: list[BaseException] = []
    with create_engine("sqlite://").connect() as connection:
        on_driver_error(connection, heard.append)
        with pytest.raises(OperationalError) as caught:
            connection.execute(text("nonsense"))
    assert heard == [caught.value.orig]


def test_a_listener_that_raises_replaces_the_error() -> None:
    def interrupted(error: BaseException) -> None:
        raise KeyboardInterrupt

    with create_engine("sqlite://").connect() as connection:
        on_driver_error(connection, interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.execute(text("nonsense"))


def test_statements_and_commits_of_one_connection_are_heard() -> None:
    """As often as SQLAlchemy's own events, by whichever of its methods a statement is executed."""
    engine, items = create_engine("sqlite://"), MetaData()
    item = Table(
        "item",
        items,
        Column("id", Integer, primary_key=True),
        Column("n", Integer, default=select(1).scalar_subquery()),
    )
    events: list[str] = []
    heard: list[str] = []
    with engine.connect() as connection, engine.connect() as other:
        event.listen(connection, "before_cursor_execute", lambda *_: events.append("statement"))
        event.listen(connection, "commit", lambda _: events.append("commit"))
        on_statement_and_commit(connection, lambda: heard.append("statement"), lambda: heard.append("commit"))

        def at_once(execute: Callable[[], object]) -> None:
            before = len(events)
            execute()
            assert events == heard
            assert len(events) > before

        at_once(lambda: items.create_all(connection))
        at_once(lambda: connection.execute(insert(item)))
        batches = insert(item).returning(item.c.id).execution_options(insertmanyvalues_page_size=2)
        before = len(heard)
        at_once(lambda: connection.execute(batches, [{"n": n} for n in range(6)]))
        assert len(heard) == before + 3
        at_once(lambda: connection.exec_driver_sql("SELECT 1"))
        at_once(lambda: connection.scalar(item.c.n.default))
        at_once(lambda: connection.begin_nested().rollback())
        at_once(connection.commit)
        other.execute(select(1))
        other.commit()
        assert events == heard


def test_a_begin_listener_is_called_again_after_it_failed() -> None:
    engine, calls = create_engine("sqlite://"), []

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        calls.append(connection)
        connection.exec_driver_sql("nonsense" if len(calls) == 1 else "BEGIN")

    with engine.connect() as connection:
        with pytest.raises(DBAPIError):
            autobegin(connection)
        begin_failed(connection)
        connection.rollback()
        autobegin(connection)
        assert connection.in_transaction()
    assert len(calls) == 2


def test_statements_have_the_hooks_of_an_operation() -> None:
    assert callable(Select._execute_on_connection)
    assert callable(Select._execute_on_scalar)
    assert callable(Session._autoflush)
    plugin: Any = CompileState._get_plugin_class_for_plugin(select(text("1")), "orm")
    assert callable(plugin.orm_pre_session_exec)
    assert callable(plugin.orm_execute_statement)


@pytest.mark.parametrize("committed", [True, False])
def test_committed_connection_needs_no_rollback(committed: bool) -> None:
    engine = create_engine("sqlite://", poolclass=QueuePool)
    known_reset = []
    event.listen(engine, "reset", lambda raw, record, state: known_reset.append(state.transaction_was_reset))
    connection = connect(engine)
    with connection.begin():
        connection.execute(text("SELECT 1"))
    return_to_pool(connection, committed=committed)
    pool: Any = engine.pool
    assert (known_reset, connection.closed, pool.checkedout()) == ([committed], True, 0)
    with engine.connect() as again:
        assert again.scalar(text("SELECT 1")) == 1
    assert pool.checkedout() == 0


@pytest.mark.parametrize("kind", [psycopg.Connection, psycopg.AsyncConnection])
def test_psycopg_has_a_begin_and_a_flag_of_autocommit(kind: Any) -> None:
    connection = kind(psycopg.pq.PGconn())
    assert (connection._autocommit, connection.autocommit) == (False, False)
    connection._autocommit = True
    assert connection.autocommit is True
    assert connection._get_tx_start_command() == b"BEGIN"

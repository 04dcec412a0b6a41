"""EngineState: what the first connection of an engine has told about its server, asked once.

It is kept by the engine's dialect, which copies of the engine with other execution options share. What may change while
the app runs, such as whether the server accepts writes, is never kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Connection, Dialect

from sqlalchemy_locks.dialects import Backend, Server, backend_for


@dataclass(frozen=True)
class EngineState:
    """The server of an engine."""

    #: a URL of PostgreSQL may lead to YugabyteDB, one of MySQL to MariaDB
    backend: Backend
    server: Server


_states: WeakKeyDictionary[Dialect, EngineState] = WeakKeyDictionary()


def engine_state(connection: Connection) -> EngineState:
    """Return the state of a connection's engine; the first call asks the server.

    :raises Unsupported: for an engine or a server on which locks don't keep their promises.
    """
    state = _states.get(connection.dialect)
    if state is None:
        begun = connection.in_transaction()
        server = backend_for(connection.dialect).ask_server(connection)
        if not begun:
            connection.rollback()  # the level of a transaction can be set before its first statement only
        state = EngineState(backend_for(connection.dialect, server), server)
        _states[connection.dialect] = state
    return state


def behind_pooler(connection: Connection) -> bool:
    """Return whether a pooler such as PgBouncer may give each transaction another session of the server."""
    session_pooling = connection.get_execution_options().get("locks_session_pooling")
    return engine_state(connection).server.pooled and not session_pooling


def backend_of(dialect: Dialect) -> Backend:
    """Return the backend of an engine, as far as it is known without a connection."""
    state = _states.get(dialect)
    return backend_for(dialect) if state is None else state.backend

"""PostgreSQL and YugabyteDB: the SQL of this library's elements."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from sqlalchemy_locks.sql.clock import Elapsed, Epoch, Now, NowAfterWait, PlusSeconds, SecondsAgo, StatementStart
from sqlalchemy_locks.sql.elements import (
    HeldKeys,
    InsertAbsent,
    LockFunction,
    Notify,
    ReleaseSessionLocks,
    SessionLock,
    SessionUnlock,
)
from sqlalchemy_locks.sql.tables import Payload


@compiles(LockFunction, "postgresql", "yugabytedb")
def _function(element: LockFunction, compiler: Any, **kw: Any) -> str:
    preparer = compiler.preparer
    schema = preparer.quote_schema(preparer.schema_for_object(element))
    return f"{schema}.{element.name}{compiler.function_argspec(element, **kw)}"


@compiles(NowAfterWait, "postgresql", "yugabytedb")
@compiles(Now, "postgresql", "yugabytedb")
def _now(element: Any, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(PlusSeconds, "postgresql", "yugabytedb")
def _plus_seconds(element: PlusSeconds, compiler: Any, **kw: Any) -> str:
    instant, seconds = (compiler.process(part, **kw) for part in element.clauses)
    return f"({instant} + {seconds} * interval '1 second')"


@compiles(Epoch, "postgresql", "yugabytedb")
def _epoch(element: Epoch, compiler: Any, **kw: Any) -> str:
    return "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)"


@compiles(InsertAbsent, "postgresql", "yugabytedb")
def _insert_absent(element: InsertAbsent, compiler: Any, **kw: Any) -> str:
    return f"{compiler.visit_insert(element, **kw)} ON CONFLICT DO NOTHING"


@compiles(Payload, "postgresql", "yugabytedb")
def _payload(element: Payload, compiler: Any, **kw: Any) -> str:
    return "JSONB"


@compiles(Notify, "postgresql", "yugabytedb")
def _notify(element: Notify, compiler: Any, **kw: Any) -> str:
    # a postgresql:// URL may lead to YugabyteDB, which has the function but delivers nothing
    return f"CASE WHEN strpos(version(), '-YB-') = 0 THEN pg_notify{compiler.function_argspec(element, **kw)}::text END"


@compiles(StatementStart, "postgresql", "yugabytedb")
def _statement_start(element: StatementStart, compiler: Any, **kw: Any) -> str:
    return "statement_timestamp()"


@compiles(SecondsAgo, "postgresql", "yugabytedb")
def _seconds_ago(element: SecondsAgo, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"statement_timestamp() - make_interval(secs => {seconds})"


@compiles(Elapsed, "postgresql", "yugabytedb")
def _elapsed(element: Elapsed, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"CAST(floor(extract(epoch FROM statement_timestamp() - {instant})) AS BIGINT)"


@compiles(HeldKeys, "postgresql")
def _held_keys(element: HeldKeys, compiler: Any, **kw: Any) -> str:
    identity = (
        "nullif(session.application_name, '') AS owner, session.usename AS \"user\", "
        "pg_catalog.host(session.client_addr) AS host, session.state"
    )
    key = "(lock.classid::bigint << 32) | lock.objid::bigint"
    return (
        f"SELECT held.key, held.mode, true AS granted, held.pid AS session, {identity}, held.ts AS since, "
        "'{}'::integer[] AS waits_for"
        f" FROM {compiler.preparer.format_table(element.table)} AS held"
        " LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid"
        f" WHERE {element.among('held.key', compiler, **kw)}"
        f" UNION ALL SELECT {key}, CASE lock.mode WHEN 'ExclusiveLock' THEN 'exclusive' ELSE 'shared' END, false,"
        f" lock.pid, {identity}, session.query_start, pg_catalog.pg_blocking_pids(lock.pid)"
        " FROM pg_catalog.pg_locks AS lock"
        " JOIN pg_catalog.pg_database AS here ON here.oid = lock.database AND here.datname = current_database()"
        " LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = lock.pid"
        " WHERE lock.locktype = 'advisory' AND lock.objsubid = 1 AND NOT lock.granted"
        f" AND {element.among(f'({key})', compiler, **kw)}"
        " ORDER BY key, granted DESC, since"
    )


# a standby grants advisory locks of its own; YugabyteDB with that setting pretends to grant them
_LOCKS_NOTHING = (
    "pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' OR "
    "coalesce(current_setting('yb_silence_advisory_locks_not_supported_error', true), 'off') = 'on'"
)


@compiles(SessionLock, "postgresql", "yugabytedb")
def _session_lock(element: SessionLock, compiler: Any, **kw: Any) -> str:
    key, _ = element.clauses
    key = compiler.process(key, **kw)
    return f"CASE WHEN {_LOCKS_NOTHING} THEN 'refused' ELSE pg_advisory_lock({key})::text END"


@compiles(SessionUnlock, "postgresql", "yugabytedb")
def _session_unlock(element: SessionUnlock, compiler: Any, **kw: Any) -> str:
    return f"pg_advisory_unlock{compiler.function_argspec(element, **kw)}"


@compiles(ReleaseSessionLocks, "postgresql", "yugabytedb")
def _release_session_locks(element: ReleaseSessionLocks, compiler: Any, **kw: Any) -> str:
    return "pg_advisory_unlock_all()"

"""PostgreSQL and YugabyteDB: the SQL of this library's elements."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from sqlalchemy_locks.sql import clock, elements
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, Payload, tables


@compiles(elements.LockFunction, "postgresql", "yugabytedb")
def _function(element: elements.LockFunction, compiler: Any, **kw: Any) -> str:
    # in the schema of any of the tables, to which schema_translate_map may have moved it
    name = compiler.preparer.format_table(tables(DEFAULT_SCHEMA, "").installed, name=element.name)
    return f"{name}{compiler.function_argspec(element, **kw)}"


@compiles(clock.NowAfterWait, "postgresql", "yugabytedb")
@compiles(clock.Now, "postgresql", "yugabytedb")
def _now(element: Any, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(clock.PlusSeconds, "postgresql", "yugabytedb")
def _plus_seconds(element: clock.PlusSeconds, compiler: Any, **kw: Any) -> str:
    instant, seconds = (compiler.process(part, **kw) for part in element.clauses)
    return f"({instant} + {seconds} * interval '1 second')"


@compiles(clock.Epoch, "postgresql", "yugabytedb")
def _epoch(element: clock.Epoch, compiler: Any, **kw: Any) -> str:
    return "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)"


@compiles(elements.InsertAbsent, "postgresql", "yugabytedb")
def _insert_absent(element: elements.InsertAbsent, compiler: Any, **kw: Any) -> str:
    return f"{compiler.visit_insert(element, **kw)} ON CONFLICT DO NOTHING"


@compiles(elements.LimitIdle, "postgresql", "yugabytedb")
def _limit_idle(element: elements.LimitIdle, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    setting = "'idle_in_transaction_session_timeout'"
    present = f"extract(epoch FROM CAST(current_setting({setting}) AS interval))"
    # 0 is no limit; in milliseconds, the longest one is 2147483647
    return (
        f"CASE WHEN {seconds} < coalesce(nullif({present}, 0), 2147483)"
        f" THEN set_config({setting}, CAST(CAST(ceil({seconds} * 1000) AS bigint) AS text), true) END"
    )


@compiles(Payload, "postgresql", "yugabytedb")
def _payload(element: Payload, compiler: Any, **kw: Any) -> str:
    return "JSONB"


@compiles(elements.Notify, "postgresql", "yugabytedb")
def _notify(element: elements.Notify, compiler: Any, **kw: Any) -> str:
    # a postgresql:// URL may lead to YugabyteDB, which has the function, but may deliver no notification
    delivers = "strpos(version(), '-YB-') = 0 OR current_setting('yb_enable_listen_notify', true) = 'on'"
    return f"CASE WHEN {delivers} THEN pg_notify{compiler.function_argspec(element, **kw)}::text END"


@compiles(clock.StatementStart, "postgresql", "yugabytedb")
def _statement_start(element: clock.StatementStart, compiler: Any, **kw: Any) -> str:
    return "statement_timestamp()"


@compiles(clock.SecondsAgo, "postgresql", "yugabytedb")
def _seconds_ago(element: clock.SecondsAgo, compiler: Any, **kw: Any) -> str:
    (seconds,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"statement_timestamp() - make_interval(secs => {seconds})"


@compiles(clock.Elapsed, "postgresql", "yugabytedb")
def _elapsed(element: clock.Elapsed, compiler: Any, **kw: Any) -> str:
    (instant,) = (compiler.process(part, **kw) for part in element.clauses)
    return f"CAST(floor(extract(epoch FROM statement_timestamp() - {instant})) AS BIGINT)"


@compiles(elements.HeldKeys, "postgresql")
def _held_keys(element: elements.HeldKeys, compiler: Any, **kw: Any) -> str:
    identity = (
        "nullif(session.application_name, '') AS owner, session.usename AS \"user\", "
        "pg_catalog.host(session.client_addr) AS host, session.state"
    )
    key = "(lock.classid::bigint << 32) | lock.objid::bigint"
    return (
        f"SELECT held.key, held.mode, true AS granted, held.pid AS session, {identity}, held.ts AS since, "
        "NULL AS waits_for"
        f" FROM {compiler.preparer.format_table(element.table)} AS held"
        " LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid"
        f" WHERE {element.among('held.key', compiler, **kw)}"
        f" UNION ALL SELECT {key}, CASE lock.mode WHEN 'ExclusiveLock' THEN 'exclusive' ELSE 'shared' END, false,"
        f" lock.pid, {identity}, session.query_start,"
        " pg_catalog.array_to_string(pg_catalog.pg_blocking_pids(lock.pid), ',') FROM pg_catalog.pg_locks AS lock"
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


@compiles(elements.SessionLock, "postgresql", "yugabytedb")
def _session_lock(element: elements.SessionLock, compiler: Any, **kw: Any) -> str:
    key, _ = element.clauses
    key = compiler.process(key, **kw)
    return f"CASE WHEN {_LOCKS_NOTHING} THEN 'refused' ELSE pg_advisory_lock({key})::text END"


@compiles(elements.SessionUnlock, "postgresql", "yugabytedb")
def _session_unlock(element: elements.SessionUnlock, compiler: Any, **kw: Any) -> str:
    return f"pg_advisory_unlock{compiler.function_argspec(element, **kw)}"


@compiles(elements.ReleaseSessionLocks, "postgresql", "yugabytedb")
def _release_session_locks(element: elements.ReleaseSessionLocks, compiler: Any, **kw: Any) -> str:
    return "pg_advisory_unlock_all()"

"""Check whether locks work in a database: the server, its settings, and what is installed, one sentence each.

The check only reads. It finds a problem in the set-up before the first lock is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import product

from sqlalchemy import select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.core.operation import GRANT_HINT, engine_state
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.findings import Finding
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.sql.clock import Now, utc
from sqlalchemy_locks.sql.tables import tables

__all__ = ["Finding", "examine"]

#: the privileges that ``grant_to`` grants and the role does not have
_MISSING_PRIVILEGES = text(
    "SELECT privilege || ' on ' || nspname || '.' || relname FROM pg_class AS c"
    " JOIN pg_namespace AS n ON n.oid = relnamespace"
    " CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege"
    " WHERE nspname = :schema AND relkind = 'r' AND relname = ANY(:names) AND NOT has_table_privilege(c.oid, privilege)"
    " UNION ALL SELECT 'EXECUTE on ' || nspname || '.' || proname FROM pg_proc AS p"
    " JOIN pg_class AS c ON c.relnamespace = pronamespace AND relname = 'installed' AND relowner = proowner"
    " JOIN pg_namespace AS n ON n.oid = pronamespace"
    " WHERE nspname = :schema AND NOT has_function_privilege(p.oid, 'EXECUTE')"
)
#: elsewhere, EXPLAIN needs the privilege of its statement
_EXPLAINED = {
    "SELECT": "SELECT 1 FROM {0}",
    "INSERT": "INSERT INTO {0} SELECT * FROM {0} WHERE FALSE",
    "UPDATE": "UPDATE {0} SET {1} = {1} WHERE FALSE",
    "DELETE": "DELETE FROM {0} WHERE FALSE",
}
#: an ordinary difference between two clocks, in seconds
SKEW = 1.0


def examine(connection: Connection, *, schema: str = "lock", prefix: str = "lock_") -> list[Finding]:
    """Check a database, for people and for readiness probes.

    :param connection: a connection to the database. On an async connection: ``await connection.run_sync(examine)``.
    :param schema: the schema that the locks were installed in, on PostgreSQL and YugabyteDB.
    :param prefix: the prefix of their tables' names on the other engines.
    :return: a :class:`Finding` for each check, with ``level="problem"`` where locks don't work or don't keep their
        guarantees.
    :raises Unsupported: for an unsupported engine.

    >>> with engine.connect() as connection:
    ...     problems = [each.says for each in examine(connection) if each.level == "problem"]
    """
    backend = backend_for(connection.dialect)
    with contextlib.suppress(Unsupported):  # one of the findings says why
        backend = backend_for(connection.dialect, backend.ask_server(connection))
    findings = list(backend.findings(connection))
    with contextlib.suppress(Unsupported):
        engine_state(connection)
        findings.append(_clock(connection))
        findings += _installed(connection, schema, prefix)
    return findings


def _clock(connection: Connection) -> Finding:
    before = time.time()
    server = utc(connection.scalar(select(Now())))
    after = time.time()
    assert server is not None
    # the server read its clock between ``before`` and ``after``: only a time outside of them is certainly a difference
    skew = max(0.0, before - server.timestamp(), server.timestamp() - after)
    if skew > SKEW:
        says = (
            f"this machine's clock and the server's differ by {skew:.1f} s. Locks are not affected, because they use "
            "the server's clock only; times in logs are"
        )
        return Finding("clock", "warning", says)
    return Finding("clock", "ok", "this machine's clock and the server's agree (locks use the server's only)")


def _installed(connection: Connection, schema: str, prefix: str) -> Iterator[Finding]:
    # imported here: Alembic is needed to examine an installation, never to lock
    from sqlalchemy_locks.alembic.drift import check
    from sqlalchemy_locks.alembic.options import Options
    from sqlalchemy_locks.alembic.steps import STEPS, recorded

    try:
        steps = recorded(connection, Options(schema=schema, prefix=prefix))
        drifts = check(connection, schema=schema, prefix=prefix) if steps is not None else []
    except DBAPIError as error:
        if backend_for(connection.dialect).meaning(error) != "denied":
            raise
        yield Finding(
            "installed", "problem", f"the user of this connection may not read what is installed: {GRANT_HINT}"
        )
        return
    if steps is None:
        says = (
            "nothing is installed here: `sqlalchemy-locks install` without Alembic; with Alembic `alembic upgrade "
            "heads`, after `op.upgrade_locks` in a revision of your own or with the shipped revisions"
        )
        yield Finding("installed", "problem", says)
        return
    absent = [step for step in STEPS if step not in steps]
    if absent:
        says = f"of the steps {', '.join(STEPS)}, {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        yield Finding("installed", "warning" if steps else "problem", f"{says}: what they install can't be used")
    else:
        yield Finding("installed", "ok", f"the steps up to {STEPS[-1]}, by {' and '.join(sorted(set(steps.values())))}")
    for sentence in drifts:
        yield Finding("index" if "has lost its index" in sentence else "drift", "problem", sentence)
    if not drifts:
        yield Finding("drift", "ok", "tables, indexes and functions are as they were installed")
    missing = ", ".join(_missing_privileges(connection, schema, prefix))
    if missing:
        yield Finding("privileges", "problem", f"the user of this connection lacks {missing}: {GRANT_HINT}")


def _missing_privileges(connection: Connection, schema: str, prefix: str) -> Iterator[str]:
    backend = backend_for(connection.dialect)
    ours = [each for each in tables(None, prefix).job.metadata.tables.values() if each.name != f"{prefix}installed"]
    if backend.schemas:
        names = [table.name.removeprefix(prefix) for table in ours]
        yield from connection.execute(_MISSING_PRIVILEGES, {"schema": schema, "names": names}).scalars()
    elif not backend.single_writer:
        quoted = connection.dialect.identifier_preparer
        for table, (privilege, statement) in product(ours, _EXPLAINED.items()):
            parts = quoted.format_table(table), quoted.format_column(table.c[0])
            try:
                connection.exec_driver_sql(f"EXPLAIN {statement.format(*parts)}".replace("%", "%%"))
            except DBAPIError as error:
                if backend.meaning(error) == "denied":
                    yield f"{privilege} on {table.name}"

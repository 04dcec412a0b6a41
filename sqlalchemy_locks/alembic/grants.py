"""What the user of a connection may not do that locks do, and the GRANT that would mend it.

It only reads: PostgreSQL's catalog tells. MySQL and MariaDB are asked to explain statements, for which a user needs the
privileges of the statements themselves, whichever way they were granted: by roles, for databases or with wildcards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.script import InstallPlace
from sqlalchemy_locks.alembic.steps import STEPS, load
from sqlalchemy_locks.dialects import backend_for

_ROWS = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: so many objects are named in a sentence, before they are in its GRANT
_FEW = 3

_SCHEMA = sa.text(
    """
    SELECT quote_ident(current_user) AS role, has_schema_privilege(oid, 'USAGE') AS may
    FROM pg_catalog.pg_namespace WHERE nspname = :schema
    """
)
_RELATIONS = sa.text(
    """
    SELECT relname, CASE relkind WHEN 'p' THEN 'r' ELSE relkind::text END AS kind,
           row_security_active(c.oid) AS hidden, has_table_privilege(c.oid, 'SELECT') AS "SELECT",
           has_table_privilege(c.oid, 'INSERT') AS "INSERT", has_table_privilege(c.oid, 'UPDATE') AS "UPDATE",
           has_table_privilege(c.oid, 'DELETE') AS "DELETE"
    FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace
    WHERE nspname = :schema AND relname IN :names AND relkind IN ('r', 'p', 'v')
    """
).bindparams(sa.bindparam("names", expanding=True))
_FUNCTIONS = sa.text(
    """
    SELECT proname, oidvectortypes(proargtypes) AS takes, has_function_privilege(p.oid, 'EXECUTE') AS may
    FROM pg_catalog.pg_proc AS p
    JOIN pg_catalog.pg_namespace AS place ON place.oid = pronamespace
    WHERE nspname = :schema AND proname IN :names
    """
).bindparams(sa.bindparam("names", expanding=True))


@dataclass(frozen=True)
class Missing:
    """Privileges that a user lacks."""

    #: a sentence, with the GRANT at its end
    says: str
    #: locks need them; otherwise only who looks at what is installed, or held
    needed: bool
    #: the tables, by the names that steps call them, whose rows can't be read
    unread: tuple[str, ...] = ()


def missing(connection: Connection, options: Options) -> list[Missing]:
    """The privileges that the connection's user lacks on what is there; none on SQLite, which has no users."""
    place = InstallPlace(connection.dialect, options)
    if place.family == "sqlite":
        return []
    return list((_postgresql if place.family == "postgresql" else _mysql)(connection, place))


def _postgresql(connection: Connection, place: InstallPlace) -> Iterator[Missing]:
    where = {"schema": place.options.schema}
    schema = connection.execute(_SCHEMA, where).first()
    if schema is None:
        return
    if not schema.may:
        grant = f"GRANT USAGE ON SCHEMA {place.schema} TO {schema.role}"
        yield Missing(f"{schema.role} lacks USAGE on the schema {place.schema}: {grant}", True, ("installed",))
    arguments = {k: v for step in STEPS for k, v in load(step).FUNCTIONS.items()}
    rows = connection.execute(_FUNCTIONS, {**where, "names": list(arguments)}).all()
    there = {(row.proname, row.takes): row.may for row in rows}
    denied = [
        f"{place.schema}.{name}({takes})" for name, takes in arguments.items() if not there.get((name, takes), True)
    ]
    if denied:
        grant = f"GRANT EXECUTE ON FUNCTION {', '.join(denied)} TO {schema.role}"
        yield Missing(f"{schema.role} lacks EXECUTE on {_named(denied, 'functions')}: {grant}", True)
    lacking: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    relations = {row.relname: row for row in connection.execute(_RELATIONS, {**where, "names": _tables(place)})}
    for name in _tables(place):
        if name in relations:
            kind = relations[name].kind
            lacks = tuple(each for each in _wanted(name, kind) if not relations[name]._mapping[each])
            lacking.setdefault((lacks, _locks_need(name, kind)), []).append(name)
    for (lacks, needed), names in lacking.items():
        if lacks:
            on = [place.table(name) for name in names]
            grant = f"GRANT {', '.join(lacks)} ON {', '.join(on)} TO {schema.role}"
            says = f"{schema.role} lacks {', '.join(lacks)} on {_named(on, 'tables')}: {grant}"
            yield Missing(says, needed, tuple(names) if "SELECT" in lacks else ())
    for name in _tables(place):
        if name in relations and relations[name].hidden:
            table = place.table(name)
            says = (
                f"row-level security may hide rows of {table} from {schema.role}, who would pass over what they hold: "
                f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"
            )
            yield Missing(says, True, (name,))


def _mysql(connection: Connection, place: InstallPlace) -> Iterator[Missing]:
    user, _, host = str(connection.exec_driver_sql("SELECT CURRENT_USER()").scalar()).rpartition("@")
    grantee = "@".join(f"`{part.replace('`', '``')}`" for part in (user, host))
    columns = {k: next(iter(v)) for step in STEPS for k, v in load(step).TABLES[place.family].items()}
    for name, column in columns.items():
        table = place.table(name)
        statements = {
            "SELECT": f"SELECT * FROM {table}",
            "INSERT": f"INSERT INTO {table} () VALUES ()",
            "UPDATE": f"UPDATE {table} SET `{column}` = 0",
            "DELETE": f"DELETE FROM {table}",
        }
        wanted = _wanted(name, "r")
        lacks = [each for each in wanted if not _explained(connection, statements[each])]
        if lacks:
            grant = f"GRANT {', '.join(lacks)} ON {table} TO {grantee}"
            says = f"{user}@{host} lacks {', '.join(lacks)} on {table}: {grant}"
            yield Missing(says, _locks_need(name, "r"), (name,) if "SELECT" in lacks else ())


def _explained(connection: Connection, statement: str) -> bool:
    """Whether the user may do it; that there is no such table is found elsewhere."""
    try:
        connection.exec_driver_sql(f"EXPLAIN {statement}").close()
    except DBAPIError as error:
        return not backend_for(connection.dialect).denied(error)
    return True


def _tables(place: InstallPlace) -> list[str]:
    return [table for step in STEPS for table in load(step).TABLES[place.family]]


def _wanted(table: str, kind: str) -> Iterable[str]:
    """What is done with a table; PostgreSQL's keys may be a view of what the server holds."""
    return _ROWS if _locks_need(table, kind) else _ROWS[:1]


def _locks_need(table: str, kind: str) -> bool:
    return table != "installed" and kind == "r"


def _named(objects: list[str], what: str) -> str:
    return ", ".join(objects) if len(objects) <= _FEW else f"{len(objects)} {what}"

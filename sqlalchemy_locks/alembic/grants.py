"""Find the privileges that a connection's user lacks for locks, and the GRANT that adds them.

It only reads. On PostgreSQL the catalog answers. MySQL and MariaDB explain statements, which takes the privileges of
the statements themselves, however they were granted: by roles, for databases or with wildcards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.script import InstallPlace

_ROWS = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: a sentence names up to this many objects; more are counted there and named in its GRANT only
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
    JOIN pg_catalog.pg_namespace AS n ON n.oid = relnamespace
    WHERE nspname = :schema AND relname IN :names AND relkind IN ('r', 'p', 'v')
    """
).bindparams(sa.bindparam("names", expanding=True))
_FUNCTIONS = sa.text(
    """
    SELECT proname, oidvectortypes(proargtypes) AS takes, has_function_privilege(p.oid, 'EXECUTE') AS may
    FROM pg_catalog.pg_proc AS p
    JOIN pg_catalog.pg_namespace AS n ON n.oid = pronamespace
    WHERE nspname = :schema AND proname IN :names
    """
).bindparams(sa.bindparam("names", expanding=True))


@dataclass(frozen=True)
class MissingPrivileges:
    """Privileges that a user lacks."""

    #: a sentence, with the GRANT at its end
    says: str
    #: whether locks need them; otherwise only reading what is installed or held does
    needed: bool
    #: the tables whose rows can't be read, by their names in the steps
    unreadable: tuple[str, ...] = ()


def missing(connection: Connection, options: Options) -> list[MissingPrivileges] | None:
    """Return the privileges that the connection's user lacks; ``None`` on SQLite, which has no users."""
    place = InstallPlace(connection.dialect, options)
    if place.backend.single_writer:
        return None
    return list((_listed if place.backend.schemas else _explained)(connection, place))


def _listed(connection: Connection, place: InstallPlace) -> Iterator[MissingPrivileges]:
    where = {"schema": place.options.schema}
    schema = connection.execute(_SCHEMA, where).first()
    if schema is None:
        return
    if not schema.may:
        grant = f"GRANT USAGE ON SCHEMA {place.schema} TO {schema.role}"
        yield MissingPrivileges(
            f"{schema.role} lacks USAGE on the schema {place.schema}: {grant}", True, ("installed",)
        )
    arguments = {k: v for step in steps.STEPS for k, v in steps.load(step).FUNCTIONS.items()}
    rows = connection.execute(_FUNCTIONS, {**where, "names": list(arguments)}).all()
    may_execute = {(row.proname, row.takes): row.may for row in rows}
    denied = [
        f"{place.schema}.{name}({takes})"
        for name, takes in arguments.items()
        if not may_execute.get((name, takes), True)
    ]
    if denied:
        grant = f"GRANT EXECUTE ON FUNCTION {', '.join(denied)} TO {schema.role}"
        yield MissingPrivileges(f"{schema.role} lacks EXECUTE on {_named(denied, 'functions')}: {grant}", True)
    lacking: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    relations = {row.relname: row for row in connection.execute(_RELATIONS, {**where, "names": _tables(place)})}
    for name in _tables(place):
        if name in relations:
            kind = relations[name].kind
            lacks = tuple(each for each in _needed_privileges(name, kind) if not relations[name]._mapping[each])
            lacking.setdefault((lacks, _locks_need(name, kind)), []).append(name)
    for (lacks, needed), names in lacking.items():
        if lacks:
            on = [place.table(name) for name in names]
            grant = f"GRANT {', '.join(lacks)} ON {', '.join(on)} TO {schema.role}"
            says = f"{schema.role} lacks {', '.join(lacks)} on {_named(on, 'tables')}: {grant}"
            yield MissingPrivileges(says, needed, tuple(names) if "SELECT" in lacks else ())
    for name in _tables(place):
        if name in relations and relations[name].hidden:
            table = place.table(name)
            says = (
                f"row-level security may hide rows of {table} from {schema.role}, whose locks would ignore them: "
                f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"
            )
            yield MissingPrivileges(says, True, (name,))


def _explained(connection: Connection, place: InstallPlace) -> Iterator[MissingPrivileges]:
    user, _, host = str(connection.exec_driver_sql("SELECT CURRENT_USER()").scalar()).rpartition("@")
    grantee = "@".join(f"`{part.replace('`', '``')}`" for part in (user, host))
    columns = {k: next(iter(v)) for step in steps.STEPS for k, v in steps.load(step).TABLES[place.family].items()}
    for name, column in columns.items():
        table = place.table(name)
        statements = {
            "SELECT": f"SELECT * FROM {table}",
            "INSERT": f"INSERT INTO {table} () VALUES ()",
            "UPDATE": f"UPDATE {table} SET `{column}` = 0",
            "DELETE": f"DELETE FROM {table}",
        }
        wanted = _needed_privileges(name, "r")
        lacks = [each for each in wanted if not _may_execute(connection, place, statements[each])]
        if lacks:
            grant = f"GRANT {', '.join(lacks)} ON {table} TO {grantee}"
            says = f"{user}@{host} lacks {', '.join(lacks)} on {table}: {grant}"
            yield MissingPrivileges(says, _locks_need(name, "r"), (name,) if "SELECT" in lacks else ())


def _may_execute(connection: Connection, place: InstallPlace, statement: str) -> bool:
    """Return whether the user may execute it; a missing table is reported elsewhere."""
    try:
        connection.exec_driver_sql(f"EXPLAIN {statement}").close()
    except DBAPIError as error:
        return place.backend.meaning(error) != "denied"
    return True


def _tables(place: InstallPlace) -> list[str]:
    return [table for step in steps.STEPS for table in steps.load(step).TABLES[place.family]]


def _needed_privileges(table: str, kind: str) -> Iterable[str]:
    """Return the privileges that are used on a table; on PostgreSQL ``locked_keys`` may be a view."""
    return _ROWS if _locks_need(table, kind) else _ROWS[:1]


def _locks_need(table: str, kind: str) -> bool:
    return table != "installed" and kind == "r"


def _named(objects: list[str], what: str) -> str:
    return ", ".join(objects) if len(objects) <= _FEW else f"{len(objects)} {what}"

"""Compare the database with what the steps installed: tables, indexes, functions (``alembic_templates/sql/``).

The check only reads, and needs no more than ``grant_to`` grants (on MySQL and MariaDB also SELECT on ``installed``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.script import InstallPlace
from sqlalchemy_locks.sql.tables import tables as sql_tables

_FUNCTIONS = sa.text(
    """
    SELECT proname, oidvectortypes(proargtypes) AS takes, prosrc
    FROM pg_catalog.pg_proc AS p
    JOIN pg_catalog.pg_namespace AS n ON n.oid = pronamespace
    WHERE nspname = :schema AND proname IN :names
    ORDER BY proname, takes
    """
).bindparams(sa.bindparam("names", expanding=True))


def check(connection: Connection, *, schema: str = "lock", prefix: str = "lock_") -> list[str]:
    """Return each difference from what ``installed`` records, as one sentence; an empty list if there is none.

    On an async connection: ``await connection.run_sync(check)``.

    :param schema: the schema of the installation on PostgreSQL and YugabyteDB.
    :param prefix: the prefix of the tables' names on the other engines.
    :raises ValueError: for a name that would need escaping, and for an unsupported engine.

    It compares the tables (columns, types, NULLs, primary key, names of indexes and unique constraints; on MySQL and
    MariaDB engine and collation) and the functions (arguments, body, and others of the same name that a call could
    reach). Of the view it only checks the existence. It reports a step of a newer release, but doesn't compare it.
    """
    options = Options(schema=schema, prefix=prefix)
    place = InstallPlace(connection.dialect, options)
    recorded = steps.recorded(connection, options)
    if recorded is None:
        return [f"{place.table('installed')} is missing: there is no record of what was installed here"]
    if not recorded:
        return [f"{place.table('installed')} is empty: no step was installed completely"]
    sentences = [
        f"step {step} was installed by a newer release of sqlalchemy-locks, which can check it"
        for step in recorded
        if step not in steps.STEPS
    ]
    loaded = [steps.load(step) for step in steps.STEPS if step in recorded]
    variant = _function_variant(connection, place) if place.backend.schemas else None
    sentences += _check_tables(connection, place, loaded, view=variant == "advisory")
    if variant is not None:
        sentences += _check_functions(connection, place, loaded, variant)
    why = place.backend.ask_server(connection).no_advisory_locks if variant == "advisory" else None
    if why is not None:
        sentences.append(f"the functions refuse every lock: {why}")
    return sentences


def _function_variant(connection: Connection, place: InstallPlace) -> str:
    """Return which variant of the functions was installed."""
    schema, name = place.schema_and_name("locked_keys")
    if name not in sa.inspect(connection).get_table_names(schema):
        return "advisory"
    return "table" if place.backend.ask_server(connection).yugabytedb is None else "yugabytedb"


def _check_tables(
    connection: Connection, place: InstallPlace, loaded: list[steps.Step], *, view: bool
) -> Iterator[str]:
    inspector = sa.inspect(connection)
    tables = {k: v for step in loaded for k, v in step.TABLES[place.family].items()}
    keys = {k: v for step in loaded for k, v in step.KEYS.items()}
    indexes = {k: v for step in loaded for k, v in step.INDEXES.items()}
    for table, columns in tables.items():
        schema, name = place.schema_and_name(table)
        shown = place.table(table)
        if not inspector.has_table(name, schema=schema):
            yield f"{shown} is missing"
            continue
        if view and table == "locked_keys":
            continue
        yield from _check_columns(connection, inspector.get_columns(name, schema=schema), columns, shown)
        key = tuple(inspector.get_pk_constraint(name, schema=schema)["constrained_columns"])
        shipped_key = keys.get(table, (next(iter(columns)),))
        if key != shipped_key:
            yield f"the primary key of {shown} is ({', '.join(key)}), not ({', '.join(shipped_key)})"
        # only some engines report a unique constraint as an index too
        names = {index["name"] for index in inspector.get_indexes(name, schema=schema)}
        names |= {unique["name"] for unique in inspector.get_unique_constraints(name, schema=schema)}
        for index in indexes.get(table, ()):
            if place.schema_and_name(index)[1] not in names:
                yield f"{shown} has lost its index {place.schema_and_name(index)[1]}"
        if not place.backend.schemas:
            # the options of this library's tables: mysql_engine, mysql_collate; SQLite reports none
            shipped = sql_tables(None, "").installed.kwargs
            for option, value in inspector.get_table_options(name).items():
                if shipped.get(option, value) != value:
                    yield f"the {option.partition('_')[2]} of {shown} is {value}, not {shipped[option]}"


def _check_columns(connection: Connection, reflected: Any, shipped: Any, shown: str) -> Iterator[str]:
    columns = {column["name"]: column for column in reflected}
    for name, type_ in shipped.items():
        if name not in columns:
            yield f"{shown} has lost its column {name}"
            continue
        spelled = columns[name]["type"].compile(dialect=connection.dialect)
        # MariaDB reports the display width of integers, both MySQL and MariaDB the collation of texts
        bare = type_.removesuffix(" NULL")
        if bare == "JSON" and spelled.startswith("LONGTEXT"):
            spelled = "JSON"  # on MariaDB a LONGTEXT with a check
        if re.sub(r"(?<=INT)\(\d+\)|(?<=INTEGER)\(\d+\)| COLLATE .*| CHARACTER SET .*", "", spelled) != bare:
            yield f"{shown}.{name} is {spelled}, not {bare}"
        collation = getattr(columns[name]["type"], "collation", None)
        if collation not in (None, "utf8mb4_bin"):
            yield f"the collation of {shown}.{name} is {collation}"
        if columns[name]["nullable"] != (type_ != bare):
            yield f"{shown}.{name} {'allows' if columns[name]['nullable'] else 'does not allow'} NULL"
    for name in columns:
        if name not in shipped:
            yield f"{shown} has a column {name} that no step created"


def _check_functions(
    connection: Connection, place: InstallPlace, loaded: list[steps.Step], variant: str
) -> Iterator[str]:
    arguments = {k: v for step in loaded for k, v in step.FUNCTIONS.items()}
    bodies = {k: v for step in loaded for k, v in step.BODIES[variant].items()}
    rows = connection.execute(_FUNCTIONS, {"schema": place.options.schema, "names": list(arguments)}).all()
    installed = {(row.proname, row.takes): row.prosrc for row in rows}
    for name, takes in arguments.items():
        body = installed.pop((name, takes), None)
        if body is None:
            yield f"{place.schema}.{name}({takes}) is missing"
        elif body != place.body(bodies[name]).split("$body$")[1]:
            yield f"the body of {place.schema}.{name}({takes}) is not the one that was installed"
    for name, takes in installed:
        yield f"{place.schema}.{name}({takes}) was not installed by a step, and calls may reach it instead"

"""Compare the database with what the steps installed: tables, indexes, functions.

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
from sqlalchemy_locks.sql.tables import tables

_FUNCTIONS = sa.text(
    """
    SELECT proname, oidvectortypes(proargtypes) AS takes, pg_get_function_arguments(p.oid) AS arguments,
           pg_get_function_result(p.oid) AS result, lanname, provolatile::text, proisstrict, prosecdef,
           proparallel::text, proconfig, prosrc
    FROM pg_catalog.pg_proc AS p
    JOIN pg_catalog.pg_namespace AS n ON n.oid = pronamespace
    JOIN pg_catalog.pg_language AS l ON l.oid = prolang
    WHERE nspname = :schema AND proname IN :names
    ORDER BY proname, takes
    """
).bindparams(sa.bindparam("names", expanding=True))

_DEFINITION = re.compile(
    r"FUNCTION [^(]*?\.(?P<name>\w+)\((?P<arguments>.*?)\)\s+RETURNS (?P<result>[^\n]+)\n"
    r"LANGUAGE (?P<language>\w+)(?P<attributes>.*?)\nAS \$body\$(?P<source>.*)\$body\$",
    re.DOTALL,
)
_SET = re.compile(r"SET (\w+) = '([^']*)'")


def check(connection: Connection, *, schema: str = "lock", prefix: str = "lock_") -> list[str]:
    """Return each difference from what ``installed`` records, as one sentence; an empty list if there is none.

    On an async connection: ``await connection.run_sync(check)``.

    :param schema: the schema of the installation on PostgreSQL and YugabyteDB.
    :param prefix: the prefix of the tables' names on the other engines.
    :raises ValueError: for a name that would need escaping, and for an unsupported engine.

    Compared are the tables (columns, types, NULLs, primary key, names of indexes and unique constraints;
    on MySQL and MariaDB engine and collation) and the functions (arguments, result, attributes, body, and
    others of the same name that a call could reach). Of the view, only the columns are compared. A step of a newer
    release is reported, not compared.
    """
    options = Options(schema=schema, prefix=prefix)
    place = InstallPlace(connection.dialect, options)
    if unreadable := _check_installed(connection, place):
        return unreadable
    recorded = steps.recorded(connection, options)
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
    return sentences


def _function_variant(connection: Connection, place: InstallPlace) -> str:
    """Return which variant of the functions was installed."""
    if place.backend.ask_server(connection).yugabytedb is not None:
        return "yugabytedb"
    schema, name = place.schema_and_name("locked_keys")
    return "table" if name in sa.inspect(connection).get_table_names(schema) else "advisory"


def _check_installed(connection: Connection, place: InstallPlace) -> list[str]:
    """Return what keeps ``installed`` from being read at all."""
    inspector = sa.inspect(connection)
    schema, name = place.schema_and_name("installed")
    if not inspector.has_table(name, schema=schema):
        return [f"{place.table('installed')} is missing: there is no record of what was installed here"]
    columns = {column["name"] for column in inspector.get_columns(name, schema=schema)}
    return [
        f"{place.table('installed')} has lost its column {column}"
        for column in ("step", "installed_by")
        if column not in columns
    ]


def _check_tables(connection: Connection, place: InstallPlace, known: list[steps.Step], *, view: bool) -> Iterator[str]:
    inspector = sa.inspect(connection)
    expected = {k: v for step in known for k, v in step.TABLES[place.family].items()}
    keys = {k: v for step in known for k, v in step.KEYS.items()}
    indexes = {k: v for step in known for k, v in step.INDEXES.items()}
    for table, columns in expected.items():
        schema, name = place.schema_and_name(table)
        shown = place.table(table)
        if view and table == "locked_keys":
            yield from _check_view(inspector, name, schema, shown)
        elif not inspector.has_table(name, schema=schema):
            yield f"{shown} is missing"
        else:
            yield from _check_columns(connection, inspector.get_columns(name, schema=schema), columns, shown)
            yield from _check_key(inspector, place, table, keys.get(table, (next(iter(columns)),)))
            yield from _check_indexes(inspector, place, table, indexes.get(table, ()))
            if not place.backend.schemas:
                yield from _check_storage(inspector.get_table_options(name), shown)


def _check_view(inspector: sa.Inspector, name: str, schema: str | None, shown: str) -> Iterator[str]:
    if name not in inspector.get_view_names(schema=schema):
        yield f"{shown} is missing"
        return
    columns = [str(column["name"]) for column in inspector.get_columns(name, schema=schema)]
    if columns != ["key", "ts", "pid", "mode"]:
        yield f"the view {shown} has the columns {', '.join(columns)}, not key, ts, pid, mode"


def _check_key(inspector: sa.Inspector, place: InstallPlace, table: str, wanted: tuple[str, ...]) -> Iterator[str]:
    schema, name = place.schema_and_name(table)
    found = tuple(inspector.get_pk_constraint(name, schema=schema)["constrained_columns"])
    if found != wanted:
        yield f"the primary key of {place.table(table)} is ({', '.join(found)}), not ({', '.join(wanted)})"


def _check_indexes(inspector: sa.Inspector, place: InstallPlace, table: str, wanted: tuple[str, ...]) -> Iterator[str]:
    schema, name = place.schema_and_name(table)
    # only some engines report a unique constraint as an index too
    names = {index["name"] for index in inspector.get_indexes(name, schema=schema)}
    names |= {unique["name"] for unique in inspector.get_unique_constraints(name, schema=schema)}
    for index in wanted:
        if place.schema_and_name(index)[1] not in names:
            yield f"{place.table(table)} has lost its index {place.schema_and_name(index)[1]}"


def _check_columns(connection: Connection, actual: Any, expected: Any, shown: str) -> Iterator[str]:
    columns = {column["name"]: column for column in actual}
    for name, type_ in expected.items():
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
        if name not in expected:
            yield f"{shown} has a column {name} that no step created"


def _check_storage(options: Any, shown: str) -> Iterator[str]:
    # as a table of the library has them: mysql_engine, mysql_collate; SQLite has none
    wanted = tables(None, "").installed.kwargs
    for option, value in options.items():
        if wanted.get(option, value) != value:
            yield f"the {option.partition('_')[2]} of {shown} is {value}, not {wanted[option]}"


def _check_functions(
    connection: Connection, place: InstallPlace, known: list[steps.Step], variant: str
) -> Iterator[str]:
    arguments = {k: v for step in known for k, v in step.FUNCTIONS.items()}
    bodies = {k: v for step in known for k, v in step.BODIES[variant].items()}
    rows = connection.execute(_FUNCTIONS, {"schema": place.options.schema, "names": list(arguments)}).all()
    installed = {(row.proname, row.takes): row for row in rows}
    for name, takes in arguments.items():
        shown = f"{place.schema}.{name}({takes})"
        row = installed.pop((name, takes), None)
        if row is None:
            yield f"{shown} is missing"
            continue
        wanted = _attributes_of_file(place.body(bodies[name]))
        if row.prosrc != wanted["source"]:
            yield f"the body of {shown} is not the one that was installed"
        for attribute, value in _attributes_of_row(row).items():
            if value != wanted[attribute]:
                yield f"the {attribute} of {shown}: {value}, not {wanted[attribute]}"
    for name, takes in installed:
        yield f"{place.schema}.{name}({takes}) was not installed by a step, and calls may reach it instead"


def _attributes_of_file(text: str) -> dict[str, Any]:
    """Return what a shipped file declares of its function, in the catalog's terms."""
    match = _DEFINITION.search(text)
    assert match is not None
    attributes = match["attributes"]
    return {
        "source": match["source"],
        # the file may break a long list into lines
        "arguments": " ".join(match["arguments"].split()),
        "result": match["result"],
        "language": match["language"],
        "volatility": "i" if "IMMUTABLE" in attributes else "v",
        "strictness": "STRICT" in attributes,
        "security": "DEFINER" if "SECURITY DEFINER" in attributes else "INVOKER",
        "parallel safety": "s" if "PARALLEL SAFE" in attributes else "u",
        "settings": [f"{name}={value}" for name, value in _SET.findall(attributes)],
    }


def _attributes_of_row(row: Any) -> dict[str, Any]:
    return {
        "arguments": row.arguments,
        "result": row.result,
        "language": row.lanname,
        "volatility": row.provolatile,
        "strictness": row.proisstrict,
        "security": "DEFINER" if row.prosecdef else "INVOKER",
        "parallel safety": row.proparallel,
        "settings": list(row.proconfig or ()),
    }

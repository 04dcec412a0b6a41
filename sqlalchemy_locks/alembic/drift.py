"""Whether the database still has what the steps installed: the tables, and the bodies of the functions.

It only reads, and needs no more than ``grant_to`` gives (MySQL and MariaDB: and SELECT on ``installed``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.script import InstallPlace
from sqlalchemy_locks.alembic.steps import STEPS, load, recorded

# prokind, so that an aggregate of the same name is seen, and the whole line that says what a function is
_FUNCTIONS = sa.text(
    """
    SELECT proname, oidvectortypes(proargtypes) AS takes, pg_get_function_arguments(p.oid) AS arguments,
           pg_get_function_result(p.oid) AS result, lanname, provolatile::text, proisstrict, prosecdef,
           proparallel::text, proconfig, prosrc
    FROM pg_catalog.pg_proc AS p
    JOIN pg_catalog.pg_namespace AS place ON place.oid = pronamespace
    JOIN pg_catalog.pg_language AS l ON l.oid = prolang
    WHERE nspname = :schema AND proname IN :names
    ORDER BY proname, takes
    """
).bindparams(sa.bindparam("names", expanding=True))

_RELATION = sa.text(
    """
    SELECT relkind::text FROM pg_catalog.pg_class
    JOIN pg_catalog.pg_namespace AS place ON place.oid = relnamespace
    WHERE nspname = :schema AND relname = 'locked_keys'
    """
)

_DEFINITION = re.compile(
    r"FUNCTION [^(]*?\.(?P<name>\w+)\((?P<arguments>.*?)\)\s+RETURNS (?P<result>[^\n]+)\n"
    r"LANGUAGE (?P<language>\w+)(?P<attributes>.*?)\nAS \$body\$(?P<source>.*)\$body\$",
    re.DOTALL,
)
_SET = re.compile(r"SET (\w+) = '([^']*)'")


def check(connection: Connection, *, schema: str = "lock", prefix: str = "lock_") -> list[str]:
    """What differs from what ``installed`` says was installed: one sentence each, none when all is well.

    Call it as ``await connection.run_sync(check)`` on an async connection.

    :param schema: where it was installed, on PostgreSQL and YugabyteDB.
    :param prefix: what it was installed under elsewhere.
    :raises ValueError: for a name that can't be one, and for an engine that this library doesn't know.

    Compared are the tables (columns, types, NULLs, primary key, names of indexes and unique constraints;
    on MySQL and MariaDB engine and collation) and the functions (arguments, result, attributes, body, and
    others of the same name that a call could reach). Of the view, its columns only. A step of a newer
    release is named, not compared.
    """
    options = Options(schema=schema, prefix=prefix)
    place = InstallPlace(connection.dialect, options)
    if lost := _lost(connection, place):
        return lost
    steps = recorded(connection, options)
    if not steps:
        return [f"{place.table('installed')} is empty: no step was installed to its end"]
    found = [
        f"step {step} was installed by a newer release of sqlalchemy-locks, which knows what it made"
        for step in steps
        if step not in STEPS
    ]
    known = [step for step in STEPS if step in steps]
    variant = _variant(connection, options) if place.family == "postgresql" else None
    found += _tables(connection, place, known, view=variant == "advisory")
    if variant is not None:
        found += _functions(connection, place, known, variant)
    return found


def _lost(connection: Connection, place: InstallPlace) -> list[str]:
    """What keeps `installed` from being read at all."""
    inspector = sa.inspect(connection)
    schema, name = place.located("installed")
    if not inspector.has_table(name, schema=schema):
        return [f"{place.table('installed')} is missing: nothing says what was installed here"]
    there = {column["name"] for column in inspector.get_columns(name, schema=schema)}
    return [
        f"{place.table('installed')} has lost its column {column}" for column in ("step", "door") if column not in there
    ]


def _variant(connection: Connection, options: Options) -> str:
    """Which of the bodies this server was given."""
    if "-YB-" in str(connection.scalar(sa.text("SELECT version()"))):
        return "yugabytedb"
    kind = connection.scalar(_RELATION, {"schema": options.schema})
    return "table" if kind in ("r", "p") else "advisory"


def _tables(connection: Connection, place: InstallPlace, steps: list[str], *, view: bool) -> Iterator[str]:
    inspector = sa.inspect(connection)
    expected = {k: v for step in steps for k, v in load(step).TABLES[place.family].items()}
    keys = {k: v for step in steps for k, v in load(step).KEYS.items()}
    indexes = {k: v for step in steps for k, v in load(step).INDEXES.items()}
    for table, columns in expected.items():
        schema, name = place.located(table)
        shown = place.table(table)
        if view and table == "locked_keys":
            yield from _view(inspector, name, schema, shown)
        elif not inspector.has_table(name, schema=schema):
            yield f"{shown} is missing"
        else:
            yield from _columns(connection, inspector.get_columns(name, schema=schema), columns, shown)
            yield from _key(inspector, place, table, keys.get(table, (next(iter(columns)),)))
            yield from _indexes(inspector, place, table, indexes.get(table, ()))
            if place.family == "mysql":
                yield from _storage(inspector.get_table_options(name), shown)


def _view(inspector: sa.Inspector, name: str, schema: str | None, shown: str) -> Iterator[str]:
    if name not in inspector.get_view_names(schema=schema):
        yield f"{shown} is missing"
        return
    columns = [str(column["name"]) for column in inspector.get_columns(name, schema=schema)]
    if columns != ["key", "ts", "pid", "mode"]:
        yield f"the view {shown} has the columns {', '.join(columns)}, not key, ts, pid, mode"


def _key(inspector: sa.Inspector, place: InstallPlace, table: str, wanted: tuple[str, ...]) -> Iterator[str]:
    schema, name = place.located(table)
    found = tuple(inspector.get_pk_constraint(name, schema=schema)["constrained_columns"])
    if found != wanted:
        yield f"the primary key of {place.table(table)} is ({', '.join(found)}), not ({', '.join(wanted)})"


def _indexes(inspector: sa.Inspector, place: InstallPlace, table: str, wanted: tuple[str, ...]) -> Iterator[str]:
    schema, name = place.located(table)
    # a unique constraint is among the indexes on some engines only
    found = {index["name"] for index in inspector.get_indexes(name, schema=schema)}
    found |= {unique["name"] for unique in inspector.get_unique_constraints(name, schema=schema)}
    for index in wanted:
        if place.located(index)[1] not in found:
            yield f"{place.table(table)} has lost its index {place.located(index)[1]}"


def _columns(connection: Connection, actual: Any, expected: Any, shown: str) -> Iterator[str]:
    there = {column["name"]: column for column in actual}
    for name, type_ in expected.items():
        if name not in there:
            yield f"{shown} has lost its column {name}"
            continue
        found = there[name]["type"].compile(dialect=connection.dialect)
        # MariaDB says how wide an integer is shown, and both how a text is collated
        bare = type_.removesuffix(" NULL")
        if bare == "JSON" and found.startswith("LONGTEXT"):
            found = "JSON"  # which is a LONGTEXT with a check on MariaDB
        if re.sub(r"(?<=INT)\(\d+\)|(?<=INTEGER)\(\d+\)| COLLATE .*| CHARACTER SET .*", "", found) != bare:
            yield f"{shown}.{name} is {found}, not {bare}"
        collation = getattr(there[name]["type"], "collation", None)
        if collation not in (None, "utf8mb4_bin"):
            yield f"the collation of {shown}.{name} is {collation}"
        if there[name]["nullable"] != (type_ != bare):
            yield f"{shown}.{name} {'allows' if there[name]['nullable'] else 'does not allow'} NULL"
    for name in there:
        if name not in expected:
            yield f"{shown} has a column {name} that no step made"


def _storage(options: Any, shown: str) -> Iterator[str]:
    # each behind the name of the dialect
    given = {name.partition("_")[2]: value for name, value in options.items()}
    for option, wanted in (("engine", "InnoDB"), ("collate", "utf8mb4_bin")):
        found = given.get(option)
        if found != wanted:
            yield f"the {option} of {shown} is {found}, not {wanted}"


def _functions(connection: Connection, place: InstallPlace, steps: list[str], variant: str) -> Iterator[str]:
    arguments = {k: v for step in steps for k, v in load(step).FUNCTIONS.items()}
    bodies = {k: v for step in steps for k, v in load(step).BODIES[variant].items()}
    rows = connection.execute(_FUNCTIONS, {"schema": place.options.schema, "names": list(arguments)}).all()
    there = {(row.proname, row.takes): row for row in rows}
    for name, takes in arguments.items():
        shown = f"{place.schema}.{name}({takes})"
        row = there.pop((name, takes), None)
        if row is None:
            yield f"{shown} is missing"
            continue
        wanted = _defined(place.body(bodies[name]))
        if row.prosrc != wanted["source"]:
            yield f"the body of {shown} is not the one that was installed"
        found = _found(row)
        for what, value in found.items():
            if value != wanted[what]:
                yield f"the {what} of {shown}: {value}, not {wanted[what]}"
    for name, takes in there:
        yield f"{place.schema}.{name}({takes}) is not ours, and calls may reach it instead of ours"


def _defined(text: str) -> dict[str, Any]:
    """What a shipped file says of its function, in the words of the catalog."""
    match = _DEFINITION.search(text)
    assert match is not None
    attributes = match["attributes"]
    return {
        "source": match["source"],
        # a long list has line breaks in the file
        "arguments": " ".join(match["arguments"].split()),
        "result": match["result"],
        "language": match["language"],
        "volatility": "i" if "IMMUTABLE" in attributes else "v",
        "strictness": "STRICT" in attributes,
        "security": "DEFINER" if "SECURITY DEFINER" in attributes else "INVOKER",
        "parallel safety": "s" if "PARALLEL SAFE" in attributes else "u",
        "settings": [f"{name}={value}" for name, value in _SET.findall(attributes)],
    }


def _found(row: Any) -> dict[str, Any]:
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

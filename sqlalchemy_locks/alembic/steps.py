"""The steps in order, and how a range of them is run, by the shipped revisions or by directives.

``installed`` records which step was installed by which of the two, so that they are never mixed in one database.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Literal, Protocol, cast

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.engine import Connection

from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.alembic.script import Family, InstallPlace, InstallScript
from sqlalchemy_locks.keys import key

STEPS: tuple[str, ...] = ("0001",)

#: options of a ``MigrationContext`` for an installation without Alembic, which has an owner, too
NO_HISTORY: Mapping[str, str] = {"version_table": "no Alembic history"}

InstalledBy = Literal["revisions", "directives"]

_DESCRIPTIONS: Mapping[str, str] = {
    "revisions": "the shipped revisions (`alembic upgrade sqlalchemy_locks@head`)",
    "directives": "directives (`op.upgrade_locks` in revisions of your own)",
}


class Step(Protocol):
    """The interface of a module ``steps/vNNNN.py``.

    Its declarations are read by the drift check, the autogenerate filter and the tests. A step that changes a table or
    a function declares the whole of it again.
    """

    #: Name to the types of its arguments, as ``oidvectortypes`` spells them.
    FUNCTIONS: Mapping[str, str]
    #: For ``advisory``, ``table`` and ``yugabytedb``: the file of each function's body.
    BODIES: Mapping[str, Mapping[str, str]]
    #: Table to column to type, as SQLAlchemy's reflection spells it; `` NULL`` follows if it may be null.
    TABLES: Mapping[Family, Mapping[str, Mapping[str, str]]]
    #: Table to primary key, where that is not the table's first column alone.
    KEYS: Mapping[str, tuple[str, ...]]
    #: Table to the names of its indexes and unique constraints, which carry the prefix as tables do.
    INDEXES: Mapping[str, tuple[str, ...]]

    def upgrade(self, op: Operations, options: Options) -> None: ...

    def downgrade(self, op: Operations, options: Options) -> None: ...


def load(step: str) -> Step:
    """Return the module of a step."""
    return cast(Step, importlib.import_module(f"sqlalchemy_locks.alembic_templates.steps.v{step}"))


def between(lower: str, upper: str) -> tuple[str, ...]:
    """Return the steps above ``lower`` up to ``upper``.

    :raises Refused: for an unknown step, or if no step is between the two.
    """
    every_step = ("base", *STEPS)
    for step in (lower, upper):
        if step not in every_step:
            raise Refused(f"there is no step {step!r} of sqlalchemy-locks: the steps are {', '.join(every_step)}")
    steps = every_step[every_step.index(lower) + 1 : every_step.index(upper) + 1]
    if not steps:
        raise Refused(
            f"from {lower!r} to {upper!r} is not upwards: upgrade goes from the lower step to the higher, "
            "downgrade from the higher to the lower"
        )
    return steps


def upgrade(op: Operations, steps: tuple[str, ...], options: Options, installed_by: InstalledBy) -> None:
    """Run steps upwards, each recorded with its owner when it is complete."""
    script = InstallScript(op, options)
    on_conflict = "ON CONFLICT DO NOTHING" if script.backend.returning else "ON DUPLICATE KEY UPDATE step = step"
    with _alone(op, script):
        _refuse_mixing(op, options, installed_by)
        for step in steps:
            load(step).upgrade(op, options)
            script.run(
                f"INSERT INTO {script.table('installed')} (step, installed_by, owner) "
                f"VALUES ('{step}', '{installed_by}', {_owner(op, script)}) {on_conflict}"
            )


def downgrade(op: Operations, steps: tuple[str, ...], options: Options, installed_by: InstalledBy) -> None:
    """Undo steps downwards; the first one drops ``installed`` too. A step that has another owner as well stays."""
    script = InstallScript(op, options)
    installed, owner = script.table("installed"), _owner(op, script)
    with _alone(op, script):
        _refuse_mixing(op, options, installed_by)
        for step in reversed(steps):
            others = f"FROM {installed} WHERE step = '{step}' AND owner <> {owner}"
            delete = f"DELETE FROM {installed} WHERE step = '{step}' AND owner = {owner}"
            if op.get_context().as_sql:
                script.run(
                    "-- fails with a duplicate key while another version table has this step, too\n"
                    f"INSERT INTO {installed} (step, installed_by, owner) SELECT step, installed_by, owner {others}"
                )
            elif (
                recorded(op.get_bind(), options) is not None
                and op.get_bind().execute(sa.text(f"SELECT count(*) {others}".replace(":", r"\:"))).scalar()
            ):
                script.run(delete)
                continue
            load(step).downgrade(op, options)
            # the first step drops the table with all of its rows, so that a DELETE would fail
            if step != STEPS[0]:
                script.run(delete)


def _owner(op: Operations, script: InstallScript) -> str:
    """Return the SQL of an installation's owner: its version table and schema. Each tenant may have its own."""
    context = op.get_context()
    table, schema = context.version_table, context.version_table_schema
    if script.backend.schemas and schema is None:
        # where the search_path finds it
        quoted = '"' + table.replace('"', '""') + '"'
        place = f"to_regclass({_literal(quoted)})"
        return (
            "coalesce((SELECT nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n"
            f" ON n.oid = relnamespace WHERE c.oid = {place}), '') || {_literal('.' + table)}"
        )
    return _literal(f"{schema or ''}.{table}")


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextlib.contextmanager
def _alone(op: Operations, script: InstallScript) -> Iterator[None]:
    """Wait for a concurrent installation, online."""
    if op.get_context().as_sql:
        yield
    else:
        with script.backend.serialized_install(
            op.get_bind(), key("sqlalchemy_locks", "installs", script.options.schema)
        ):
            yield


def recorded(connection: Connection, options: Options) -> dict[str, str] | None:
    """Return the installed steps and what each was installed by; ``None`` without the table."""
    schema, name = InstallPlace(connection.dialect, options).schema_and_name("installed")
    if not sa.inspect(connection).has_table(name, schema=schema):
        return None
    table = sa.table(name, sa.column("step", sa.String), sa.column("installed_by", sa.String), schema=schema)
    rows = connection.execute(sa.select(table.c.step, table.c.installed_by).order_by(table.c.step))
    return {row.step: row.installed_by for row in rows}


def _refuse_mixing(op: Operations, options: Options, installed_by: InstalledBy) -> None:
    if op.get_context().as_sql:
        return  # the script may run on any database, or on none
    for step, other in (recorded(op.get_bind(), options) or {}).items():
        if other != installed_by:
            raise Refused(
                f"step {step} was installed here by {_DESCRIPTIONS.get(other, other)}, and "
                f"{_DESCRIPTIONS[installed_by]} can't continue from there: stay with the one that was used first"
            )

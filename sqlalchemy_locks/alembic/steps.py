"""The steps in order, and how a range of them is run, by the shipped revisions or by directives.

``installed`` records which step was installed by which of the two, so that they are never mixed in one database.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Literal, Protocol, cast

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.engine import Connection

from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.alembic.script import Family, InstallPlace, InstallScript
from sqlalchemy_locks.keys import key

STEPS: tuple[str, ...] = ("0001",)

InstalledBy = Literal["revisions", "directives"]

_DESCRIPTIONS: Mapping[str, str] = {
    "revisions": "the shipped revisions (`alembic upgrade sqlalchemy_locks@head`)",
    "directives": "directives (`op.upgrade_locks` in revisions of your own)",
}


class Step(Protocol):
    """What a module ``steps/vNNNN.py`` has.

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
    known = ("base", *STEPS)
    for step in (lower, upper):
        if step not in known:
            raise Refused(f"there is no step {step!r} of sqlalchemy-locks: the steps are {', '.join(known)}")
    steps = known[known.index(lower) + 1 : known.index(upper) + 1]
    if not steps:
        raise Refused(
            f"from {lower!r} to {upper!r} is not upwards: upgrade goes from the lower step to the higher, "
            "downgrade from the higher to the lower"
        )
    return steps


def upgrade(op: Operations, steps: tuple[str, ...], options: Options, installed_by: InstalledBy) -> None:
    """Run steps upwards, each recorded when it is complete."""
    script = InstallScript(op, options)
    if not op.get_context().as_sql:
        script.backend.serialize_install(op.get_bind(), key("sqlalchemy_locks", "installs", options.schema))
    _refuse_mixing(op, options, installed_by)
    installed = script.table("installed")
    on_conflict = "ON CONFLICT DO NOTHING" if script.backend.returning else "ON DUPLICATE KEY UPDATE step = step"
    for step in steps:
        load(step).upgrade(op, options)
        script.run(f"INSERT INTO {installed} (step, installed_by) VALUES ('{step}', '{installed_by}') {on_conflict}")


def downgrade(op: Operations, steps: tuple[str, ...], options: Options, installed_by: InstalledBy) -> None:
    """Undo steps downwards; the first one drops ``installed`` too."""
    script = InstallScript(op, options)
    if not op.get_context().as_sql:
        script.backend.serialize_install(op.get_bind(), key("sqlalchemy_locks", "installs", options.schema))
    _refuse_mixing(op, options, installed_by)
    for step in reversed(steps):
        load(step).downgrade(op, options)
        # Down to the base no record is deleted by itself: repeated after a failure, it would miss the table
        if STEPS[0] not in steps:
            script.run(f"DELETE FROM {script.table('installed')} WHERE step = '{step}'")


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

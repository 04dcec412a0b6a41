"""The steps in order, and how a range of them is run, by either door.

Door A is the shipped revisions, door B the directives in revisions of the app's own. ``installed``
records which step came by which, so that the two are never mixed in one database.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Literal, Protocol, cast

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.engine import Connection

from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.alembic.script import Family, InstallPlace, InstallScript, family
from sqlalchemy_locks.keys import key

STEPS = ("0001", "0002", "0003", "0004")

Door = Literal["revisions", "directives"]

_DOORS: dict[str, str] = {
    "revisions": "the shipped revisions (`alembic upgrade sqlalchemy_locks@head`)",
    "directives": "directives (`op.upgrade_locks` in revisions of your own)",
}

# to the end of the transaction; a postgresql:// URL may lead to YugabyteDB, whose older releases have no such locks
_ALONE = sa.text(
    "SELECT CASE WHEN strpos(version(), '-YB-') = 0 THEN CAST(pg_advisory_xact_lock(:key) AS TEXT) END"
).bindparams(sa.bindparam("key", type_=sa.BigInteger()))


class Step(Protocol):
    """What a module ``steps/vNNNN.py`` has.

    What it declares is read by the drift check, the autogenerate filter and the tests. A step that
    changes a table or a function declares the whole of it again.
    """

    #: Name to the types of its arguments, as ``oidvectortypes`` spells them.
    FUNCTIONS: Mapping[str, str]
    #: ``advisory``, ``table`` and ``yugabytedb``: the file of each function, the same one where it serves.
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
    """The module of a step."""
    return cast(Step, importlib.import_module(f"sqlalchemy_locks.alembic_templates.steps.v{step}"))


def between(lower: str, upper: str) -> tuple[str, ...]:
    """The steps above ``lower`` up to ``upper``.

    :raises Refused: for a step that doesn't exist, or no step between the two.
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


def upgrade(op: Operations, steps: tuple[str, ...], options: Options, door: Door) -> None:
    """Run steps upwards, each recorded when it is done."""
    _one_at_a_time(op, options)
    _refuse_mixing(op, options, door)
    script = InstallScript(op, options)
    installed = script.table("installed")
    ignored = {
        "postgresql": "ON CONFLICT DO NOTHING",
        "mysql": "ON DUPLICATE KEY UPDATE step = step",
        "sqlite": "ON CONFLICT DO NOTHING",
    }[script.family]
    for step in steps:
        load(step).upgrade(op, options)
        script.run(f"INSERT INTO {installed} (step, door) VALUES ('{step}', '{door}') {ignored}")


def downgrade(op: Operations, steps: tuple[str, ...], options: Options, door: Door) -> None:
    """Undo steps downwards; the first one takes ``installed`` with it."""
    _one_at_a_time(op, options)
    _refuse_mixing(op, options, door)
    script = InstallScript(op, options)
    for step in reversed(steps):
        load(step).downgrade(op, options)
        # Down to the base no record is undone by itself: run again after it died, it would miss the table
        if STEPS[0] not in steps:
            script.run(f"DELETE FROM {script.table('installed')} WHERE step = '{step}'")


def recorded(connection: Connection, options: Options) -> dict[str, str] | None:
    """The steps that are installed with the door each came by; ``None`` without the table."""
    schema, name = InstallPlace(connection.dialect, options).located("installed")
    if not sa.inspect(connection).has_table(name, schema=schema):
        return None
    table = sa.table(name, sa.column("step", sa.String), sa.column("door", sa.String), schema=schema)
    rows = connection.execute(sa.select(table.c.step, table.c.door).order_by(table.c.step))
    return {row.step: row.door for row in rows}


def _one_at_a_time(op: Operations, options: Options) -> None:
    """Of those who install at the same time one waits for the other; elsewhere the engine sees to it.

    PostgreSQL's ``IF NOT EXISTS`` and ``OR REPLACE`` fail where two look at the same time, and neither finds it.
    """
    context = op.get_context()
    if not context.as_sql and family(context.dialect) == "postgresql":
        op.get_bind().execute(_ALONE, {"key": key("sqlalchemy_locks", "installs", options.schema)})


def _refuse_mixing(op: Operations, options: Options, door: Door) -> None:
    if op.get_context().as_sql:
        return  # the script may run on any database, or on none
    for step, other in (recorded(op.get_bind(), options) or {}).items():
        if other != door:
            raise Refused(
                f"step {step} was installed here by {_DOORS.get(other, other)}, and {_DOORS[door]} can't "
                "go on from there: stay with the one that was begun with"
            )

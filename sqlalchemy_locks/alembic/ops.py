"""The directives, for the app's own revisions. Importing this module registers them.

    from alembic import op
    from sqlalchemy_locks.alembic import ops

    def upgrade() -> None:
        op.upgrade_locks(from_="base", to="0001")
        op.add_lock_columns("order", retries=True, queue=True, fence=True)

    def downgrade() -> None:
        op.drop_lock_columns("order", retries=True, queue=True, fence=True)
        op.downgrade_locks(from_="0001", to="base")

Both ends are named, so that a revision keeps its meaning when the library adds steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alembic.operations import MigrateOperation, Operations
from sqlalchemy import BigInteger, Column, Integer, text

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.sql.tables import exact_name

#: The column of each role. Rows that exist already get the default, or NULL.
_COLUMNS: Mapping[str, Callable[[], Column[Any]]] = {
    "retries": lambda: Column("retries_left", Integer()),
    "queue": lambda: Column("queue_id", exact_name(255), nullable=False, server_default=text("'default'")),
    "fence": lambda: Column("fence", BigInteger(), nullable=False, server_default=text("0")),
    "token": lambda: Column("token", exact_name(32)),
    "claim": lambda: Column("claim", BigInteger(), nullable=False, server_default=text("0")),
}


@Operations.register_operation("upgrade_locks")
@Operations.register_operation("downgrade_locks")
class InstallDirectives(MigrateOperation):
    """``op.upgrade_locks`` and ``op.downgrade_locks``."""

    @classmethod
    def upgrade_locks(cls, operations: Operations, *, from_: str, to: str, **options: Any) -> None:
        """Install the steps above ``from_`` up to ``to``.

        :param from_: the last step that is installed already, ``"base"`` for none.
        :param to: the last step to install.
        :param options: as keywords, those of :class:`~sqlalchemy_locks.alembic.Options`: ``schema``, ``prefix``,
            ``grant_to``, ``locking``.
        :raises ValueError: for an unknown step, the wrong direction, a name that would need escaping, an option that
            the engine doesn't support, and if the shipped revisions have installed steps in this database.
        """
        steps.upgrade(operations, steps.between(from_, to), Options(**options), "directives")

    @classmethod
    def downgrade_locks(cls, operations: Operations, *, from_: str, to: str, **options: Any) -> None:
        """Remove the steps from ``from_`` down to ``to``, ``"base"`` for all.

        Parameters and errors are those of ``upgrade_locks``; pass the values that were used to upgrade. No other object
        is removed: if one depends on an object of a step, the engine refuses.
        """
        steps.downgrade(operations, steps.between(to, from_), Options(**options), "directives")


@Operations.register_operation("add_lock_columns")
@Operations.register_operation("drop_lock_columns")
class ColumnDirectives(MigrateOperation):
    """``op.add_lock_columns`` and ``op.drop_lock_columns``."""

    @classmethod
    def add_lock_columns(cls, operations: Operations, table: str, *, schema: str | None = None, **roles: bool) -> None:
        """Add columns of locks to a table of the app.

        :param schema: the table's schema.
        :param roles: as keywords, the columns:

            - ``retries=True``: ``retries_left``, an integer; ``NULL``, which means unlimited, in existing rows.
            - ``queue=True``: ``queue_id``, a name, compared exactly on every engine; ``'default'`` in existing rows. A
              unique constraint on the id alone is not changed: replace it if ids are unique within a queue only.
            - ``fence=True``: ``fence``, the fencing token of the last write or acquisition; 0 in existing rows.
            - ``token=True``: ``token``, the nonce by which ``Locks`` recognizes its own acquisition after a lost reply.
            - ``claim=True``: ``claim``, a random number that each capture writes: the proof of having captured a row.
        :raises ValueError: if none is selected, or for an unknown one.
        """
        for role in _selected(table, roles):
            operations.add_column(table, _COLUMNS[role](), schema=schema)

    @classmethod
    def drop_lock_columns(cls, operations: Operations, table: str, *, schema: str | None = None, **roles: bool) -> None:
        """Drop the columns that ``add_lock_columns`` added, with the same parameters."""
        for role in reversed(_selected(table, roles)):
            operations.drop_column(table, str(_COLUMNS[role]().name), schema=schema)


def _selected(table: str, roles: Mapping[str, bool]) -> list[str]:
    selected = [role for role in _COLUMNS if roles.get(role)]
    if not selected or not roles.keys() <= _COLUMNS.keys():
        raise Refused(f"{table}: name at least one column, e.g. fence=True; there are {', '.join(_COLUMNS)}")
    return selected

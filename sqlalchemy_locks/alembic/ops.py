"""The directives, for the app's own revisions. Importing this module registers them.

    from sqlalchemy_locks.alembic import ops

    def upgrade() -> None:
        op.upgrade_locks(from_="base", to="0001")

    def downgrade() -> None:
        op.downgrade_locks(from_="0001", to="base")

Both ends are named, so that a revision keeps its meaning when the library adds steps. ``ops.upgrade_locks()`` and
``ops.downgrade_locks()`` are the same functions, for type checkers, which can't see what was added to ``op``.
"""

from __future__ import annotations

from collections.abc import Iterable

from alembic import op as _op
from alembic.operations import MigrateOperation, Operations

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.columns import add_lock_columns, drop_lock_columns
from sqlalchemy_locks.alembic.options import Options

__all__ = [
    "DowngradeLocksOp",
    "UpgradeLocksOp",
    "add_lock_columns",
    "downgrade_locks",
    "drop_lock_columns",
    "upgrade_locks",
]


@Operations.register_operation("upgrade_locks")
class UpgradeLocksOp(MigrateOperation):
    """Install steps of this library."""

    def __init__(self, from_: str, to: str, options: Options) -> None:
        self.from_ = from_
        self.to = to
        self.steps = steps.between(from_, to)
        self.options = options

    @classmethod
    def upgrade_locks(
        cls,
        operations: Operations,
        *,
        from_: str,
        to: str,
        schema: str = "lock",
        prefix: str = "lock_",
        grant_to: str | Iterable[str] | None = None,
        locking: str = "native",
    ) -> None:
        """Install the steps above ``from_`` up to ``to``; see :func:`upgrade_locks`."""
        options = Options.from_arguments(schema=schema, prefix=prefix, grant_to=grant_to, locking=locking)
        operations.invoke(cls(from_, to, options))

    def reverse(self) -> DowngradeLocksOp:
        """Return the directive that undoes this one."""
        return DowngradeLocksOp(self.to, self.from_, self.options)


@Operations.register_operation("downgrade_locks")
class DowngradeLocksOp(MigrateOperation):
    """Remove steps of this library."""

    def __init__(self, from_: str, to: str, options: Options) -> None:
        self.from_ = from_
        self.to = to
        self.steps = steps.between(to, from_)
        self.options = options

    @classmethod
    def downgrade_locks(
        cls,
        operations: Operations,
        *,
        from_: str,
        to: str,
        schema: str = "lock",
        prefix: str = "lock_",
        grant_to: str | Iterable[str] | None = None,
        locking: str = "native",
    ) -> None:
        """Remove the steps from ``from_`` down to ``to``; see :func:`downgrade_locks`."""
        options = Options.from_arguments(schema=schema, prefix=prefix, grant_to=grant_to, locking=locking)
        operations.invoke(cls(from_, to, options))

    def reverse(self) -> UpgradeLocksOp:
        """Return the directive that undoes this one."""
        return UpgradeLocksOp(self.to, self.from_, self.options)


@Operations.implementation_for(UpgradeLocksOp)
def _upgrade(operations: Operations, operation: UpgradeLocksOp) -> None:
    steps.upgrade(operations, operation.steps, operation.options, "directives")


@Operations.implementation_for(DowngradeLocksOp)
def _downgrade(operations: Operations, operation: DowngradeLocksOp) -> None:
    steps.downgrade(operations, operation.steps, operation.options, "directives")


def upgrade_locks(
    *,
    from_: str,
    to: str,
    schema: str = "lock",
    prefix: str = "lock_",
    grant_to: str | Iterable[str] | None = None,
    locking: str = "native",
) -> None:
    """Install the steps above ``from_`` up to ``to``; also ``op.upgrade_locks()``.

    :param from_: the last step that is installed already, ``"base"`` for none.
    :param to: the last step to install.
    :param schema: the schema on PostgreSQL and YugabyteDB. It is created if it doesn't exist.
    :param prefix: the prefix of the tables' names on MySQL, MariaDB and SQLite.
    :param grant_to: a role, or several, to grant what the locks need and no more.
    :param locking: ``"table"``: on PostgreSQL, lock rows of a table instead of advisory keys.
    :raises ValueError: for an unknown step, the wrong direction, a name that would need escaping, an option that the
        engine doesn't support, and if the shipped revisions have installed steps in this database.
    """
    options = Options.from_arguments(schema=schema, prefix=prefix, grant_to=grant_to, locking=locking)
    _op.invoke(UpgradeLocksOp(from_, to, options))


def downgrade_locks(
    *,
    from_: str,
    to: str,
    schema: str = "lock",
    prefix: str = "lock_",
    grant_to: str | Iterable[str] | None = None,
    locking: str = "native",
) -> None:
    """Remove the steps from ``from_`` down to ``to``, ``"base"`` for all; also ``op.downgrade_locks()``.

    Parameters and errors are those of :func:`upgrade_locks`; pass the values that were used to upgrade. Nothing else is
    removed: the engine refuses while another object depends on one of these.
    """
    options = Options.from_arguments(schema=schema, prefix=prefix, grant_to=grant_to, locking=locking)
    _op.invoke(DowngradeLocksOp(from_, to, options))

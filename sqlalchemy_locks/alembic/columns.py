"""Directives that add the columns of locks to a table of the app; import them as ``ops.py`` shows.

def upgrade() -> None:
    op.add_lock_columns("order", retries=True, queue=True, fence=True)

def downgrade() -> None:
    op.drop_lock_columns("order", retries=True, queue=True, fence=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alembic import op as _op
from alembic.operations import MigrateOperation, Operations
from sqlalchemy import BigInteger, Column, Integer, String, text

from sqlalchemy_locks.alembic.options import Refused

#: The column of each role. Rows that exist already get the default, or NULL.
_COLUMNS: Mapping[str, Callable[[], Column[Any]]] = {
    "retries": lambda: Column("retries_left", Integer()),
    "queue": lambda: Column("queue_id", String(255), nullable=False, server_default=text("'default'")),
    "fence": lambda: Column("fence", BigInteger(), nullable=False, server_default=text("0")),
    "token": lambda: Column("token", String(32)),
    "claim": lambda: Column("claim", BigInteger(), nullable=False, server_default=text("0")),
}


class _LockColumnsOp(MigrateOperation):
    def __init__(self, table: str, roles: list[str], schema: str | None) -> None:
        if not roles:
            raise Refused(f"{table}: name at least one column, e.g. fence=True; there are {', '.join(_COLUMNS)}")
        self.table = table
        self.roles = roles
        self.schema = schema


def _selected(**roles: bool) -> list[str]:
    return [role for role in _COLUMNS if roles[role]]


@Operations.register_operation("add_lock_columns")
class AddLockColumnsOp(_LockColumnsOp):
    """Add columns."""

    @classmethod
    def add_lock_columns(
        cls,
        operations: Operations,
        table: str,
        *,
        retries: bool = False,
        queue: bool = False,
        fence: bool = False,
        token: bool = False,
        claim: bool = False,
        schema: str | None = None,
    ) -> None:
        """Add columns of locks to a table; see :func:`add_lock_columns`."""
        roles = _selected(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
        operations.invoke(cls(table, roles, schema))

    def reverse(self) -> DropLockColumnsOp:
        """Return the directive that undoes this one."""
        return DropLockColumnsOp(self.table, self.roles, self.schema)


@Operations.register_operation("drop_lock_columns")
class DropLockColumnsOp(_LockColumnsOp):
    """Drop columns."""

    @classmethod
    def drop_lock_columns(
        cls,
        operations: Operations,
        table: str,
        *,
        retries: bool = False,
        queue: bool = False,
        fence: bool = False,
        token: bool = False,
        claim: bool = False,
        schema: str | None = None,
    ) -> None:
        """Drop a table's columns of locks; see :func:`drop_lock_columns`."""
        roles = _selected(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
        operations.invoke(cls(table, roles, schema))

    def reverse(self) -> AddLockColumnsOp:
        """Return the directive that undoes this one."""
        return AddLockColumnsOp(self.table, self.roles, self.schema)


@Operations.implementation_for(AddLockColumnsOp)
def _add(operations: Operations, operation: AddLockColumnsOp) -> None:
    for role in operation.roles:
        operations.add_column(operation.table, _COLUMNS[role](), schema=operation.schema)


@Operations.implementation_for(DropLockColumnsOp)
def _drop(operations: Operations, operation: DropLockColumnsOp) -> None:
    for role in reversed(operation.roles):
        operations.drop_column(operation.table, str(_COLUMNS[role]().name), schema=operation.schema)


def add_lock_columns(
    table: str,
    *,
    retries: bool = False,
    queue: bool = False,
    fence: bool = False,
    token: bool = False,
    claim: bool = False,
    schema: str | None = None,
) -> None:
    """Add columns of locks to a table of the app; also ``op.add_lock_columns()``.

    :param retries: ``retries_left``, an integer; ``NULL``, which means unlimited, in existing rows.
    :param queue: ``queue_id``, a name; ``'default'`` in existing rows. A unique constraint on the id alone is not
        changed: replace it if ids are unique within a queue only.
    :param fence: ``fence``, the fencing token of the last write or acquisition; 0 in existing rows.
    :param token: ``token``, the nonce by which ``Locks`` recognizes its own acquisition after a lost reply.
    :param claim: ``claim``, a random number that each capture writes: the proof of having captured a row.
    :param schema: the table's schema.
    :raises ValueError: if none is selected.
    """
    roles = _selected(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
    _op.invoke(AddLockColumnsOp(table, roles, schema))


def drop_lock_columns(
    table: str,
    *,
    retries: bool = False,
    queue: bool = False,
    fence: bool = False,
    token: bool = False,
    claim: bool = False,
    schema: str | None = None,
) -> None:
    """Drop the columns that :func:`add_lock_columns` added; also ``op.drop_lock_columns()``."""
    roles = _selected(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
    _op.invoke(DropLockColumnsOp(table, roles, schema))

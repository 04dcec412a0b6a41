"""Directives that give a table of the app's own the columns of locks; see ``ops.py`` for how to import them.

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

#: What each role is made of. A new table's rows have them at once, so each has a default or is NULL.
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
            raise Refused(f"{table}: say which columns, e.g. fence=True; there are {', '.join(_COLUMNS)}")
        self.table = table
        self.roles = roles
        self.schema = schema


def _chosen(**roles: bool) -> list[str]:
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
        """Give a table columns of locks; see :func:`add_lock_columns`."""
        roles = _chosen(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
        operations.invoke(cls(table, roles, schema))

    def reverse(self) -> DropLockColumnsOp:
        """What undoes this."""
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
        """Take a table's columns of locks away; see :func:`drop_lock_columns`."""
        roles = _chosen(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
        operations.invoke(cls(table, roles, schema))

    def reverse(self) -> AddLockColumnsOp:
        """What undoes this."""
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
    """Give a table of the app's own columns of locks; also ``op.add_lock_columns()``.

    :param retries: ``retries_left``, an integer; ``NULL``, as many as you like, in the rows that are there.
    :param queue: ``queue_id``, a name; ``'default'`` in the rows that are there. A unique constraint on the id alone
        is yours to change, where ids shall be unique inside a queue only.
    :param fence: ``fence``, the fencing token of the last write or acquisition, 0 at first.
    :param token: ``token``, the nonce by which ``Locks`` knows its own acquisition again after a lost reply.
    :param claim: ``claim``, which rises at each capture: the proof of who has captured a row.
    :param schema: the table's schema.
    :raises ValueError: when none is chosen.
    """
    roles = _chosen(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
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
    """Take the columns away that :func:`add_lock_columns` gave; also ``op.drop_lock_columns()``."""
    roles = _chosen(retries=retries, queue=queue, fence=fence, token=token, claim=claim)
    _op.invoke(DropLockColumnsOp(table, roles, schema))

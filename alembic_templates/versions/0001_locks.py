"""Locks, mutexes, timeouts, state transitions, the queue, semaphores: all tables and functions.

Revision ID: sqlalchemy_locks_0001
Revises:
"""

from alembic import op

from sqlalchemy_locks.alembic import revisions

revision = "sqlalchemy_locks_0001"
down_revision = None
branch_labels = ("sqlalchemy_locks",)
depends_on = None


def upgrade() -> None:
    """Run step 0001 with the options of alembic.ini."""
    revisions.upgrade(op, "0001")


def downgrade() -> None:
    """Undo step 0001."""
    revisions.downgrade(op, "0001")

"""Mutex and timeout: task_state and task_timeout.

Revision ID: sqlalchemy_locks_0002
Revises: sqlalchemy_locks_0001
"""

from alembic import op

from sqlalchemy_locks.alembic import revisions

revision = "sqlalchemy_locks_0002"
down_revision = "sqlalchemy_locks_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run step 0002 with the options that alembic.ini gives."""
    revisions.upgrade(op, "0002")


def downgrade() -> None:
    """Undo it."""
    revisions.downgrade(op, "0002")

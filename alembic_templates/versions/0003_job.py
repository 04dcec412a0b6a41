"""State transitions and the queue: task and job.

Revision ID: sqlalchemy_locks_0003
Revises: sqlalchemy_locks_0002
"""

from alembic import op

from sqlalchemy_locks.alembic import revisions

revision = "sqlalchemy_locks_0003"
down_revision = "sqlalchemy_locks_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run step 0003 with the options that alembic.ini gives."""
    revisions.upgrade(op, "0003")


def downgrade() -> None:
    """Undo it."""
    revisions.downgrade(op, "0003")

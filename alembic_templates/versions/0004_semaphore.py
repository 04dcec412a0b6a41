"""The counting semaphore: semaphore, permit_request, permit, semaphore_history.

Revision ID: sqlalchemy_locks_0004
Revises: sqlalchemy_locks_0003
"""

from alembic import op

from sqlalchemy_locks.alembic import revisions

revision = "sqlalchemy_locks_0004"
down_revision = "sqlalchemy_locks_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run step 0004 with the options that alembic.ini gives."""
    revisions.upgrade(op, "0004")


def downgrade() -> None:
    """Undo it."""
    revisions.downgrade(op, "0004")

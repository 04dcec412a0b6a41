"""Install the locks: their tables and functions, in the shop's own history."""

from alembic import op

from sqlalchemy_locks.alembic import ops  # noqa: F401  (registers the two directives)

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.upgrade_locks(from_="base", to="0001")


def downgrade() -> None:
    op.downgrade_locks(from_="0001", to="base")

"""The export, and the semaphore that limits concurrent exports."""

import sqlalchemy as sa
from alembic import op

import sqlalchemy_locks as sl

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    exports = op.create_table(
        "exports",
        sa.Column("name", sa.String(40), primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("by", sa.String(255), nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.bulk_insert(exports, [{"name": "orders", "body": "", "by": ""}])
    # the migration's connection executes an operation like any statement
    op.get_bind().execute(sl.semaphore.create("exports", capacity=1, by="migration"))


def downgrade() -> None:
    op.get_bind().execute(sl.semaphore.delete("exports", by="migration"))
    op.drop_table("exports")

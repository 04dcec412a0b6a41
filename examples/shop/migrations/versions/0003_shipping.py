"""For the shippers: claim and time of an order, and an index for the capture."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("orders", sa.Column("claim", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("orders", sa.Column("updated_at", sa.DateTime(timezone=True)))
    op.add_column("orders", sa.Column("timeout", sa.Integer, nullable=False, server_default="600"))
    op.create_index("orders_by_status", "orders", ["status", "id"])


def downgrade() -> None:
    op.drop_index("orders_by_status", "orders")
    with op.batch_alter_table("orders") as table:
        for column in ("timeout", "updated_at", "claim"):
            table.drop_column(column)

"""Invoices, which the workers count up.

Revision ID: demo_0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "demo_0001"
down_revision = None
branch_labels = ("demo",)
depends_on = "sqlalchemy_locks_0001"


def upgrade() -> None:
    """Make the table, and two invoices."""
    invoice = op.create_table(
        "invoice",
        sa.Column("name", sa.String(20), primary_key=True),
        sa.Column("positions", sa.Integer, nullable=False),
    )
    op.bulk_insert(invoice, [{"name": name, "positions": 0} for name in ("invoice:1", "invoice:2")])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("invoice")

"""Targets, their documents and backups.

Revision ID: backup_0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "backup_0001"
down_revision = None
branch_labels = ("backup",)
depends_on = "sqlalchemy_locks_0001"

_identity = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "target",
        sa.Column("id", _identity, primary_key=True),
        sa.Column("name", sa.String(255), nullable=False, unique=True),
        sa.Column("latest_id", sa.BigInteger),
        sa.Column("fence", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.create_table(
        "document",
        sa.Column("target_id", sa.BigInteger, sa.ForeignKey("target.id"), primary_key=True),
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "backup",
        sa.Column("id", _identity, primary_key=True),
        sa.Column("key", sa.String(255), nullable=False, unique=True),
        sa.Column("target_id", sa.BigInteger, sa.ForeignKey("target.id"), nullable=False, index=True),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("documents", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("backup")
    op.drop_table("document")
    op.drop_table("target")

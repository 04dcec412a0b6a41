"""What the shipped revisions call: one step each, with the options of Alembic's configuration."""

from __future__ import annotations

from typing import Any

from alembic.operations import Operations

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.options import Options


def upgrade(op: Any, step: str) -> None:
    """Run one step; ``op`` is Alembic's own module of that name."""
    operations, options = _configured(op)
    steps.upgrade(operations, (step,), options, "revisions")


def downgrade(op: Any, step: str) -> None:
    """Undo one step."""
    operations, options = _configured(op)
    steps.downgrade(operations, (step,), options, "revisions")


def _configured(op: Any) -> tuple[Operations, Options]:
    context = op.get_context()
    return Operations(context), Options.from_config(context.config)

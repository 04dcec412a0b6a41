"""The functions that the shipped revisions call: each runs one step, with the options of Alembic's configuration."""

from __future__ import annotations

import re
from typing import Any

from alembic.operations import Operations
from alembic.util import CommandError

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.options import Options

#: a number of steps that names no branch
_RELATIVE = re.compile(r"-\d+")


def upgrade(op: Any, step: str) -> None:
    """Run one step; ``op`` is Alembic's own module of that name."""
    operations, options = _configured(op)
    steps.upgrade(operations, (step,), options, "revisions")


def downgrade(op: Any, step: str) -> None:
    """Undo one step.

    :raises CommandError: when Alembic has chosen it among several heads, for ``alembic downgrade -1``.
    """
    operations, options = _configured(op)
    context: Any = operations.get_context()
    environment = context.environment_context
    asked_for = None if environment is None else environment.context_opts.get("destination_rev")
    if _RELATIVE.fullmatch(str(asked_for)) and len(context.get_current_heads()) > 1:
        raise CommandError(
            f"alembic downgrade {asked_for}, with several heads, has reached the tables of the locks, and would drop "
            f"them with their data. Name the branch: BRANCH@{asked_for} or REVISION for yours, "
            f"sqlalchemy_locks@{asked_for} for the locks"
        )
    steps.downgrade(operations, (step,), options, "revisions")


def _configured(op: Any) -> tuple[Operations, Options]:
    context = op.get_context()
    return Operations(context), Options.from_config(context.config)

"""Alembic's implementation for the dialect name ``yugabytedb``, which Alembic itself doesn't know.

Importing this module registers it, which must happen before ``context.configure()`` in ``env.py``: importing anything
from ``sqlalchemy_locks.alembic`` there is enough.
"""

from __future__ import annotations

from alembic.ddl.postgresql import PostgresqlImpl


class YugabyteDBImpl(PostgresqlImpl):
    """PostgreSQL's implementation, except that DDL commits by itself."""

    __dialect__ = "yugabytedb"
    # Each revision is committed with its own version row. With one transaction for all of them, a failure would roll
    # back the version rows of revisions whose DDL is committed.
    transactional_ddl = False

"""Alembic's implementation for the dialect name ``yugabytedb``, which Alembic itself doesn't know.

It is registered when this module is imported, which must be before ``context.configure()`` in
``env.py``: importing anything from ``sqlalchemy_locks.alembic`` there does it.
"""

from __future__ import annotations

from alembic.ddl.postgresql import PostgresqlImpl


class YugabyteDBImpl(PostgresqlImpl):
    """PostgreSQL's, except that DDL commits by itself."""

    __dialect__ = "yugabytedb"
    # Each revision is committed with its own version row. In one transaction over all of them, a failure
    # would take back the rows of revisions whose DDL has stayed.
    transactional_ddl = False

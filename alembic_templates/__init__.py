"""Files for Alembic, shipped as ``sqlalchemy_locks.alembic_templates``.

``versions/`` has the revisions, ``steps/`` what they do, ``sql/`` the functions. ``generic/`` and ``async/`` are
templates for ``alembic init -t``.
"""

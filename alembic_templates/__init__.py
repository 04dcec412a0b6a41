"""What the package ships for Alembic, as ``sqlalchemy_locks.alembic_templates``.

``versions/`` has the revisions, ``steps/`` what they do, ``sql/`` the bodies of the functions, and
``generic/`` and ``async/`` are templates for ``alembic init -t``.
"""

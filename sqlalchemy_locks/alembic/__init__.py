"""Alembic: install this library's objects by its own revisions, or by directives in yours.

Importing this package registers Alembic's implementation for the dialect name ``yugabytedb``. The directives are
registered by ``sqlalchemy_locks.alembic.ops``.
"""

from __future__ import annotations

from importlib.resources import files

from sqlalchemy_locks.alembic import impl as _impl  # noqa: F401 - registers itself
from sqlalchemy_locks.alembic.autogenerate import include_name, own_branch
from sqlalchemy_locks.alembic.drift import check
from sqlalchemy_locks.alembic.migration_lock import migration_lock
from sqlalchemy_locks.alembic.options import Options, Refused

__all__ = ["Options", "Refused", "check", "include_name", "migration_lock", "own_branch", "template"]

_TEMPLATES = ("generic", "async")


def template(name: str) -> str:
    """Return the path of a template's folder, for ``alembic init -t``.

    :param name: ``"generic"``, or ``"async"`` for an async engine.
    :raises ValueError: for another name.
    """
    if name not in _TEMPLATES:
        raise ValueError(f"there is no template {name!r}: there are {' and '.join(map(repr, _TEMPLATES))}")
    return str(files("sqlalchemy_locks.alembic_templates") / name)

"""Adapters for frameworks and monitoring libraries; each module is imported only by its users."""

from __future__ import annotations


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error of an integration whose library isn't installed: it names the extra that brings it."""
    return ModuleNotFoundError(f"{error}: pip install 'sqlalchemy-locks[{extra}]'", name=error.name)

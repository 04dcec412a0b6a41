"""The page at /locks: what is held, and by which owner."""

import secrets
from typing import Any

from fastapi import HTTPException, Request
from fastapi.security import HTTPBasic

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import dashboard

from .settings import settings

basic = HTTPBasic()  # raises 401 without a password; the page answers with the HTTPException of a callback


async def operator(request: Request) -> str:
    """Return the visitor's name, or refuse a wrong password."""
    login = await basic(request)
    assert login is not None
    if not secrets.compare_digest(f"{login.username}:{login.password}".encode(), settings.locks_admin.encode()):
        raise HTTPException(401, "that is not the password", {"WWW-Authenticate": "Basic"})
    return login.username


async def seen_by(request: Request) -> bool:
    return bool(await operator(request))


def of(locks: sl.AsyncLocks) -> Any:
    """Mount the page, read-only unless ``LOCKS_ADMIN`` is set."""
    if not settings.locks_admin:
        return dashboard.asgi(locks)
    return dashboard.asgi(locks, view=seen_by, authorize=operator, secret=settings.locks_admin)

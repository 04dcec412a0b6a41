"""The page at /locks: what is held, and by whom."""

import secrets
from typing import Any

from fastapi import HTTPException, Request
from fastapi.security import HTTPBasic

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import dashboard

from .settings import settings

basic = HTTPBasic()  # whoever sends no password is asked for one: what a callback raises, FastAPI answers


async def operator(request: dashboard.Request) -> str:
    """The name of who knows the password."""
    given = await basic(Request(dict(request.scope or {})))
    assert given is not None
    if not secrets.compare_digest(f"{given.username}:{given.password}".encode(), settings.locks_admin.encode()):
        raise HTTPException(401, "that is not the password", {"WWW-Authenticate": "Basic"})
    return given.username


async def seen_by(request: dashboard.Request) -> bool:
    return bool(await operator(request))


def of(locks: sl.AsyncLocks) -> Any:
    """To be looked at only, unless ``LOCKS_ADMIN`` says who may act."""
    if not settings.locks_admin:
        return dashboard.asgi(locks)
    return dashboard.asgi(locks, view=seen_by, authorize=operator, secret=settings.locks_admin)

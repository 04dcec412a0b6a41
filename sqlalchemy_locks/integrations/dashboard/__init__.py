"""A web page that shows what is held and what waits (extra ``dashboard``).

It is a Starlette app, on the app's ``Locks``: any ASGI app mounts it, and ``wsgi`` makes a WSGI app of it. It is
read-only unless ``authorize=`` grants a visitor actions. **It has no login of its own**: everyone who can reach it can
see it, unless ``view=`` denies it.

>>> from sqlalchemy_locks.integrations import dashboard
>>> app.mount("/locks", dashboard.asgi(locks, view=is_staff))
"""

from __future__ import annotations

from sqlalchemy_locks.integrations import missing

try:
    from sqlalchemy_locks.integrations.dashboard.app import asgi, wsgi
except ModuleNotFoundError as error:
    raise missing("dashboard", error) from error

__all__ = ["asgi", "wsgi"]

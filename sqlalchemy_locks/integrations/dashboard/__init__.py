"""A web page that shows what is held and what waits (extra ``dashboard``).

It mounts in any WSGI or ASGI app, on the app's ``Locks``. It is read-only unless ``authorize=`` grants a visitor
actions. **It has no login of its own**: everyone who can reach it can see it, unless ``view=`` denies it.

>>> from sqlalchemy_locks.integrations import dashboard
>>> app.mount("/locks", dashboard.asgi(locks, view=is_staff))
"""

from __future__ import annotations

from sqlalchemy_locks.integrations.dashboard.app import asgi, wsgi
from sqlalchemy_locks.integrations.dashboard.http import Request

__all__ = ["Request", "asgi", "wsgi"]

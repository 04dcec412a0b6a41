"""A page to look at: semaphores and their holders, queues, keys and who waits for whom, mutexes, maintenance (extra
``dashboard``).

It mounts in any WSGI or ASGI app, on the ``Locks`` that the app has. It reads; it changes nothing unless
``authorize=`` says who may. **It has no login of its own**: whoever reaches it sees it, unless ``view=`` says no.

>>> from sqlalchemy_locks.integrations import dashboard
>>> app.mount("/locks", dashboard.asgi(locks, view=is_staff))
"""

from __future__ import annotations

from sqlalchemy_locks.integrations.dashboard.app import asgi, wsgi
from sqlalchemy_locks.integrations.dashboard.http import Request

__all__ = ["Request", "asgi", "wsgi"]

"""``Locks`` and its blocks, which wait, renew and retry; ``async_locks.py`` runs them in a greenlet."""

"""What waits, renews and retries: ``Locks`` and what it gives; ``async_locks.py`` runs it in a greenlet."""

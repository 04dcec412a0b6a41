"""What waits, renews and retries: ``Locks``, ``AsyncLocks`` and what they give."""

"""How often a client waits for its server; ``sqlalchemy-locks bench`` counts the same way."""

from sqlalchemy_locks.cli.wire import Wire

__all__ = ["Wire"]

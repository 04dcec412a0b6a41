"""What each kind of engine implements to lock keys; ``advisory.py`` picks the implementation."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import BigInteger, bindparam
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution

#: the parameter of every statement about one key
LOCK_KEY = bindparam("lock_key", type_=BigInteger())


class LockMode(NamedTuple):
    """How a key is acquired."""

    shared: bool
    #: acquire it only if it is free
    tries: bool
    #: acquire it even where the snapshot is older than the lock
    allow_stale: bool


class KeyLocks:
    """Locks on keys, as one kind of engine implements them.

    A ``*_statement`` method returns the one statement that does it, or ``None`` where several are needed; the method
    without the suffix then executes those.
    """

    #: why ``acquire`` is not one statement, as a clause
    acquire_needs: str = ""

    def acquire_statement(self, context: BuildContext, mode: LockMode) -> Executable | None:
        raise NotImplementedError

    def acquire(self, execution: Execution, mode: LockMode, statement: Executable | None) -> bool | None:
        """Acquire the key of this execution.

        :param statement: what ``acquire_statement`` returned.
        :return: whether it is held, if ``mode.tries``, which never waits; else ``None``, once it is held.
        """
        raise NotImplementedError

    def unlock_statement(self) -> Executable:
        raise NotImplementedError

    def vacuum_statement(self) -> Executable | None:
        return None

    def vacuum(self, execution: Execution) -> int:
        raise NotImplementedError

    def create_statement(self) -> Executable | None:
        return None

    def create(self, execution: Execution) -> int:
        raise NotImplementedError

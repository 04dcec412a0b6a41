"""``LockHost``: the engine, sessions, owner, events and way to run operations that all parts of ``Locks`` share.

The parts import it, and it imports none of them.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.core.engine_state import backend_of
from sqlalchemy_locks.core.operation import Operation, installation
from sqlalchemy_locks.facade.run import OperationRunner
from sqlalchemy_locks.runtime.cancellation import shielded
from sqlalchemy_locks.runtime.events import Observed
from sqlalchemy_locks.runtime.reentry import tables_of
from sqlalchemy_locks.runtime.retry import Sleep, sleep_for

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

#: the longest wait for the rows of a semaphore or a request, and for the queue in memory before them, in seconds
ROW_TIMEOUT = 5.0


class LockHost(Observed):
    """The base of ``Locks``, as its blocks, mutexes, semaphores and maintenance know it.

    :param session_maker: makes the sessions of blocks, and of operations that give entities.
    :param owner: as for ``Locks``.
    """

    def __init__(self, engine: Engine, session_maker: Callable[..., Session], owner: str | None) -> None:
        self._engine, self._session_maker = engine, session_maker
        self._sleep: Sleep = sleep_for(engine)
        self._owner = None if owner is None else valid_name(owner, "an owner")
        self._nonce = secrets.token_hex(4)
        #: the process of the last call of ``owner``, and the name for it
        self._process = 0, ""
        #: runs one operation in a transaction of its own
        self._run = self._runner().run

    def _runner(self, connect: Callable[[], Connection] | None = None) -> OperationRunner:
        """Return what runs operations. :param connect: gives the connections, instead of the app's pool."""
        return OperationRunner(self._engine, self._session_maker, self._sleep, self._emit_retried, connect)

    @cached_property
    def _installation(self) -> str:
        """What tells the tables of this engine from those of another schema or prefix; see :func:`installation`."""
        return installation(self._engine)

    @cached_property
    def _tables(self) -> str:
        """As ``_installation``, for re-entry; see :func:`~sqlalchemy_locks.runtime.reentry.tables_of`."""
        return tables_of(self._engine)

    def _run_on_request(self, operation: Operation[Any], on_lost: Callable[[], object] = lambda: None) -> Any:
        """Run what may wait for a ``guarded`` write of a request, not longer than ``ROW_TIMEOUT``.

        :param on_lost: as for :meth:`OperationRunner.run`.
        """
        # where it would be two more round trips, the server has a limit of its own
        wait = ROW_TIMEOUT if backend_of(self._engine.dialect).schemas else None
        return self._run(operation, wait=wait, on_lost=on_lost)

    def _shield(self, run: Callable[[Operation[Any]], Any], operation: Operation[Any]) -> Any:
        """Call ``run(operation)`` to its end, for a task that was cancelled, and may be so at each ``await``."""
        if not self._engine.dialect.is_async:
            return run(operation)
        return await_only(shielded(greenlet_spawn(run, operation)))

    @property
    def owner(self) -> str:
        """The owner that is stored with what is acquired."""
        if self._owner is not None:
            return self._owner
        process, name = self._process
        if process != os.getpid():  # a fork is another process
            process = os.getpid()
            name = f"{socket.gethostname()[:200]}:{process}:{self._nonce}"
            self._process = process, name
        return name

    @property
    def engine_name(self) -> str:
        """The engine's name in error messages and events."""
        return backend_of(self._engine.dialect).name

    def _emit_retried(self, operation: str, error: BaseException, count: int) -> None:
        self._emit("retried", operation, (), error=error, count=count)

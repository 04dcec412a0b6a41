"""``LockHost``: the engine, sessions, owner, events and way to run operations that all parts of ``Locks`` share.

The parts import it, and it imports none of them.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.engine import Connection
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks._forks import in_forked_child
from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.asyncio_waits import shielded
from sqlalchemy_locks.core.operation import Operation, backend_of, fresh_nonce, installation
from sqlalchemy_locks.core.transaction import Attempts, OperationRunner
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.base import Sleep, sleep_for
from sqlalchemy_locks.errors import UnknownTask
from sqlalchemy_locks.runtime import reentry
from sqlalchemy_locks.runtime.events import Observed

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

#: the hosts whose owner is named after this process: a forked process renames them
_named_by_process: WeakSet[LockHost] = WeakSet()


class LockHost(Observed):
    """The base of ``Locks``, as its blocks, mutexes, semaphores and maintenance know it.

    :param session_maker: makes the sessions of blocks, and of operations that give entities.
    :param owner: as for ``Locks``.
    """

    owner: str
    """The owner that is stored with permits and mutexes."""

    def __init__(self, engine: Engine, session_maker: Callable[..., Session], owner: str | None) -> None:
        self._engine, self._session_maker = engine, session_maker
        #: known without a connection, which is enough for ``single_writer`` and ``key_rows``
        self._backend = backend_for(engine.dialect)
        self._sleep: Sleep = sleep_for(engine.dialect)
        self._nonce = secrets.token_hex(4)
        self.owner = self._process_name() if owner is None else valid_name(owner, "an owner")
        if owner is None:
            _named_by_process.add(self)
        runner = self._runner()
        #: runs one operation in a transaction of its own
        self._run, self._run_on_request = runner.run, runner.run_on_request
        self._after_begin = runner.attempts.after_begin

    def _runner(self, checkout: Callable[[], Connection] | None = None) -> OperationRunner:
        """Return a runner of operations. :param checkout: checks a connection out; by default of the app's pool."""
        before_write = partial(reentry.refuse_write, self._engine)
        attempts = Attempts(self._engine, self._session_maker, checkout)
        return OperationRunner(self._engine, attempts, self._sleep, self._emit_retried, before_write)

    @cached_property
    def _installation(self) -> str:
        """A text that distinguishes this engine's tables from those of another schema or prefix (``installation``)."""
        return installation(self._engine)

    @cached_property
    def _reentry_scope(self) -> str:
        """As ``_installation``, for re-entry; see :func:`~sqlalchemy_locks.runtime.reentry.scope_of`."""
        return reentry.scope_of(self._engine)

    def _acquire_period(self, timeout: Timeout, name: str, queue: str | None) -> bool:
        """Acquire the current period of a name, which is created on first use; ``False`` when another caller has."""
        operation, nonce = timeout.acquire(name, queue=queue), fresh_nonce()
        try:
            return bool(self._run(operation, nonce))
        except UnknownTask:
            self._run(timeout.create(name, queue=queue))
            return bool(self._run(operation, nonce))

    def _shield(self, run: Callable[[Operation[Any]], Any], operation: Operation[Any]) -> Any:
        """Call ``run(operation)`` to its end, though its task was cancelled, and may be cancelled at each ``await``."""
        if not self._engine.dialect.is_async:
            return run(operation)
        return await_only(shielded(greenlet_spawn(run, operation)))

    def _process_name(self) -> str:
        return f"{socket.gethostname()[:200]}:{os.getpid()}:{self._nonce}"

    @property
    def engine_name(self) -> str:
        """The engine's name in error messages and events."""
        return backend_of(self._engine.dialect).name

    def _emit_retried(self, operation: str, error: BaseException, count: int) -> None:
        self._emit("retried", operation, (), error=error, count=count)


@in_forked_child
def _rename() -> None:
    for host in list(_named_by_process):
        host.owner = host._process_name()

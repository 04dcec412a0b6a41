"""How ``Locks`` runs the operations of permits: which waits they have, and what a cancelled task still ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks.core.operation import Operation
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.runtime.cancellation import shielded
from sqlalchemy_locks.runtime.reentry import tables_of
from sqlalchemy_locks.semaphore.release import unflushed
from sqlalchemy_locks.values import Grant

#: the longest wait for the rows of a semaphore or a request, and for the queue in memory before them, in seconds
ROW_TIMEOUT = 5.0


class PermitRunner:
    """Runs the operations of permits for one ``Locks``."""

    def __init__(self, locks: LockHost) -> None:
        self.locks = locks
        self.engine = locks._engine
        #: the app's isolation level makes operations fail in autocommit: they have transactions of their own
        self._in_transactions = False

    @property
    def installation(self) -> str:
        """What tells the tables of this engine from those of another schema or prefix; see :func:`installation`."""
        return self.locks._installation

    @cached_property
    def tables(self) -> str:
        """As :attr:`installation`, for re-entry; see :func:`~sqlalchemy_locks.runtime.reentry.tables_of`."""
        return tables_of(self.engine)

    def run(
        self,
        operation: Operation[Any],
        nonce: str | None = None,
        *,
        wait: float | None = None,
        on_lost: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run an operation, in autocommit where that is one round trip, unless the app's isolation level forbids it.

        :param nonce: :param wait: :param on_lost: as :meth:`OperationRunner.run` takes them.
        """
        run = self.locks._run
        if not self._in_transactions:
            try:
                return run(operation, nonce, wait=wait, on_lost=on_lost)
            except DBAPIError as error:
                # at REPEATABLE READ an operation that waited for a row fails to serialize, at each retry
                if not backend_for(self.engine.dialect).transient(error):
                    raise
            self._in_transactions = True
        return run(operation, nonce, short=True, wait=wait, on_lost=on_lost)

    def run_on_request(self, operation: Operation[Any]) -> Any:
        """As :meth:`run`, for what may wait for a ``guarded`` write of the request, not longer than ``ROW_TIMEOUT``."""
        # where it would be two more round trips, the server has a limit of its own
        return self.run(operation, wait=ROW_TIMEOUT if backend_for(self.engine.dialect).schemas else None)

    def run_release(self, release: Operation[Any], request: str | Grant) -> Any:
        """Run the release of a request, unflushed if ``Locks`` was created so and the request has a time to live."""
        if not self.locks._durable_release and isinstance(request, Grant) and request.expires_at is not None:
            release = unflushed(release)
        return self.run_on_request(release)

    def shield(self, run: Callable[[Operation[Any]], Any], operation: Operation[Any]) -> Any:
        """Call ``run(operation)`` to its end, for a task that was cancelled, and may be so at each ``await``."""
        if not self.engine.dialect.is_async:
            return run(operation)
        return await_only(shielded(greenlet_spawn(run, operation)))

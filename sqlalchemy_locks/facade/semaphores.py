"""The semaphores of ``Locks``: acquiring with a wait, releasing, renewing and sweeping. It knows no SQL.

The pattern: "Distributed Counting Semaphore with MySQL", the complete acquire: an id that makes it repeatable,
sorted names, a gate in memory, a bounded wait for the rows, up to three retries, and nothing left on the connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only, greenlet_spawn

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import timeout_seconds
from sqlalchemy_locks.core.operation import Operation, installation
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.connections import disposing_replaced_pool, engine_with_own_pool
from sqlalchemy_locks.errors import PoolTimeout
from sqlalchemy_locks.facade.semaphore_wait import ROW_TIMEOUT, SemaphoreWaiter
from sqlalchemy_locks.runtime.cancellation import shielded
from sqlalchemy_locks.runtime.reentry import tables_of
from sqlalchemy_locks.runtime.renewal import RenewalThread
from sqlalchemy_locks.semaphore.release import unflushed
from sqlalchemy_locks.semaphore.statements import BATCH
from sqlalchemy_locks.semaphore.sweep import end_orphans, overdue_requests, owned_requests, release_unchanged, stale_age
from sqlalchemy_locks.values import Grant, Released

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from sqlalchemy_locks.facade.locks import Locks

Alive = Callable[[list[str]], Iterable[str]]

DAY = 86400.0
_log = logging.getLogger("sqlalchemy_locks")
#: the longest lock wait of a background renewal, and its longest wait for the pool, as parts of the time to live
_RENEWAL_WAIT = 1 / 24


def check_alive(alive: Any) -> None:
    """:raises TypeError: for what can't tell which owners are alive."""
    if alive is not None and not callable(alive):
        raise TypeError(f"alive is a function of a list of owners, not {alive!r}")


class Semaphores:
    """What ``Locks`` does with semaphores; the methods of ``Locks`` with the same names document it."""

    def __init__(self, locks: Locks) -> None:
        self.locks = locks
        self.engine = locks._engine
        #: the app's isolation level makes operations fail in autocommit: they have transactions of their own
        self._in_transactions = False
        self._renewals = RenewalThread()

    @cached_property
    def installation(self) -> str:
        """What tells the tables of this engine from those of another schema or prefix; see :func:`installation`."""
        return installation(self.engine)

    @cached_property
    def tables(self) -> str:
        """As :attr:`installation`, for re-entry; see :func:`~sqlalchemy_locks.runtime.reentry.tables_of`."""
        return tables_of(self.engine)

    def acquire(
        self,
        permits: Mapping[str, int],
        external_id: str | None,
        owner: str | None,
        ttl: float | timedelta | None,
        timeout: float | timedelta | None,
    ) -> Grant:
        owner = self.locks.owner if owner is None else owner
        request = semaphore.acquire(permits, external_id=external_id, owner=owner, ttl=ttl)
        return SemaphoreWaiter(self, request, timeout_seconds(timeout), known=external_id is not None).wait()

    def release(self, external_id: str | Grant) -> Released:
        released: Released = self.run_release(semaphore.release(external_id), external_id)
        if released is Released.RELEASED and self.locks._has_listeners:
            self._emit("released", external_id)
        return released

    def renew(self, external_id: str | Grant) -> bool:
        renewed = bool(self.run_on_request(semaphore.renew(external_id)))
        if not renewed:
            self._emit("lost", external_id)
        return renewed

    def sweep(self, stale_after: float | timedelta | None, alive: Alive | None) -> int:
        check_alive(alive)
        age = stale_age(stale_after)
        dead = [] if alive is None else self._requests_of_dead_owners(alive)
        swept: int = 0
        after = 0
        while requests := self.run(overdue_requests(age, after)):
            swept += self.run(release_unchanged(requests))
            after = requests[-1][0]
        for start in range(0, len(dead), BATCH):
            swept += self.run(release_unchanged(dead[start : start + BATCH]))
        swept += self.run(end_orphans())
        if swept:
            self.locks._emit("swept", "semaphore", (), count=swept)
        return swept

    def _requests_of_dead_owners(self, alive: Alive) -> list[tuple[Any, ...]]:
        verdicts: dict[str, bool] = {}
        dead: list[tuple[Any, ...]] = []
        after = 0
        while found := self.run(owned_requests(after)):
            unknown = sorted({owner for _, _, owner in found} - verdicts.keys())
            if unknown:
                answer: Any = alive(unknown)
                if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
                    raise TypeError(
                        f"alive returns those of the given owners that are alive, as a list or set, not {answer!r}"
                    )
                living = frozenset(answer)
                if not all(isinstance(each, str) for each in living):
                    raise TypeError(f"alive returns those of the given owners that are alive, not {answer!r}")
                verdicts |= {owner: owner in living for owner in unknown}
            dead += [(request, renewed_at) for request, renewed_at, owner in found if not verdicts[owner]]
            after = found[-1][0]
        return dead

    def run(
        self,
        operation: Operation[Any],
        nonce: str | None = None,
        *,
        wait: float | None = None,
        checkout: float | None = None,
        on_lost: Callable[[], object] = lambda: None,
        engine: Engine | None = None,
    ) -> Any:
        """Run an operation, in autocommit where that is one round trip, unless the app's isolation level forbids it.

        :param nonce: :param wait: :param checkout: :param on_lost: as :meth:`OperationRunner.run` takes them.
        :param engine: another one than that of the locks.
        """
        run = self.locks._run if engine is None else self.locks._runner_on(engine).run
        if not self._in_transactions:
            try:
                return run(operation, nonce, wait=wait, checkout=checkout, on_lost=on_lost)
            except DBAPIError as error:
                # at REPEATABLE READ an operation that waited for a row fails to serialize, at each retry
                if not backend_for(self.engine.dialect).transient(error):
                    raise
            self._in_transactions = True
        return run(operation, nonce, short=True, wait=wait, checkout=checkout, on_lost=on_lost)

    def run_on_request(self, operation: Operation[Any]) -> Any:
        """As :meth:`run`, for what may wait for a ``guarded`` write of the request, not longer than ``ROW_TIMEOUT``."""
        # where it would be two more round trips, the server has a limit of its own
        return self.run(operation, wait=ROW_TIMEOUT if backend_for(self.engine.dialect).calls_functions else None)

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

    def renewal_of(self, grant: Grant, ttl: float) -> Callable[[], bool]:
        """Return what renews a grant in the background. It keeps no reference to the block.

        :param ttl: its time to live, in seconds.
        """
        wait = ROW_TIMEOUT
        if not backend_for(self.engine.dialect).single_writer:
            # a renewal that waits behind a guarded write keeps a thread that other leases need
            wait = min(wait, ttl * _RENEWAL_WAIT)

        def renew() -> bool:
            operation = semaphore.renew(grant)
            try:
                with disposing_replaced_pool(self.engine):
                    return bool(self.run(operation, wait=wait, checkout=ttl * _RENEWAL_WAIT))
            except PoolTimeout as error:
                # what holds all connections of the pool may be what the leases are for
                _log.warning("the lease %r is renewed outside of the app's pool: %s", grant.external_id, error)
            own = engine_with_own_pool(self.engine)
            try:
                return bool(self.run(operation, wait=wait, engine=own))
            finally:
                own.dispose()

        return renew

    def renewals(self) -> RenewalThread:
        """Return the threads that renew leases; those of a forked process are its own."""
        if self._renewals.process != os.getpid():
            self._renewals = RenewalThread()
        return self._renewals

    def _emit(self, what: str, request: str | Grant) -> None:
        if isinstance(request, Grant):
            names, ident, fence = request.permits, request.external_id, request.fence
            self.locks._emit(what, "semaphore", names, external_id=ident, fence=fence)
        else:  # of a bare id the semaphores aren't known
            self.locks._emit(what, "semaphore", (), external_id=request)

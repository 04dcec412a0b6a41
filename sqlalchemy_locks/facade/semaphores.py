"""What ``Locks`` does with semaphores: waiting for room, sweeping, and the in-memory gate. It knows no SQL.

The pattern: "Distributed Counting Semaphore with MySQL", the complete acquire: an id that makes it repeatable,
sorted names, a gate in memory, a bounded wait for the rows, up to three retries, and nothing left on the connection.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import timeout_seconds, valid_name
from sqlalchemy_locks.core.operation import Operation, fresh_nonce
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.connections import has_room
from sqlalchemy_locks.errors import LockTimeout, OutcomeUnknown
from sqlalchemy_locks.facade.lease import LeaseContext
from sqlalchemy_locks.facade.semaphore_wait import PATIENCE, SemaphoreWaiter
from sqlalchemy_locks.runtime.events import Observed
from sqlalchemy_locks.runtime.renewal import RenewalThread
from sqlalchemy_locks.runtime.retry import Sleep
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.semaphore.release import withdraw
from sqlalchemy_locks.semaphore.sweep import overdue, owned, stale, strays, taken
from sqlalchemy_locks.values import Grant, PermitHolder, Released

Alive = Callable[[list[str]], Iterable[str]]

DAY = 86400.0


class SemaphoreMethods(Observed):
    """The semaphore's part of ``Locks``."""

    _engine: Engine
    _sleep: Sleep
    _sets_isolation: bool
    _run: Callable[..., Any]

    def acquire(
        self,
        permits: Mapping[str, int],
        *,
        external_id: str | None = None,
        owner: str | None = None,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
    ) -> Grant:
        """Take permits of one or more semaphores, all of them or none, waiting for room.

        :param permits: how many of each semaphore.
        :param external_id: the id of this request: whoever gives it again gets the same grant. Made up without one.
        :param owner: who holds them; by default :attr:`owner`.
        :param ttl: how long they are held without being renewed, in seconds or as a ``timedelta``; ``None``: until
            they are released, or swept.
        :param timeout: the longest wait, in seconds or as a ``timedelta``; ``None`` waits, ``0`` tries once (which may
            wait for others in the middle of theirs, 5 seconds at most). MySQL and MariaDB wait for a locked row in
            whole seconds.
        :return: a :class:`~sqlalchemy_locks.Grant`, acquired.
        :raises LockTimeout: when there was no room in time; its ``holders`` are then those who held the permits, unless
            it was a try (``timeout=0``).
        :raises OutcomeUnknown: when the connection died, and so did those of three more tries; it tells the id.
        :raises RequestOver: when this id was acquired before, and was released or ran out: it is never granted again,
            but to a block that reclaims what ran out.
        :raises UnknownSemaphore: :raises IdempotencyConflict: as :func:`sqlalchemy_locks.semaphore.acquire`.

        >>> grant = locks.acquire({"backup-slots": 1, "network": 2}, external_id="job-1", ttl=3600, timeout=10)
        >>> locks.release("job-1")
        """
        operation = semaphore.acquire(
            permits, external_id=external_id, owner=self.owner if owner is None else owner, ttl=ttl
        )
        patience, known = timeout_seconds(timeout), external_id is not None
        return self._granted(self._waiting(operation, patience, known, {}), known)

    def semaphore(
        self,
        permits: str | Mapping[str, int],
        *,
        count: int | None = None,
        ttl: float | timedelta = 60,
        timeout: float | timedelta | None = None,
        external_id: str | None = None,
        owner: str | None = None,
        resume: bool = True,
        reclaim: bool = False,
    ) -> LeaseContext:
        """Hold permits of one or more semaphores while the block runs, renewed in the background.

        :param permits: a semaphore's name, or how many of each of several.
        :param count: how many permits of the one that was given by its name; 1 without it.
        :param ttl: how long they are held when nobody renews them, because the process died or was stopped: in seconds
            or as a ``timedelta``, at least a second. They are renewed three times in that.
        :param timeout: :param external_id: :param owner: as for :meth:`acquire`.
        :param resume: enter with an ``external_id`` that is held already, too; with ``False`` that is refused, so that
            two who ask with one id never work at once.
        :param reclaim: enter with an ``external_id`` whose time ran out before it was released, since its process
            died, as with a new one; without it that is over, as one that was released is. Only with
            ``resume=False``: else two who come with it at once would both be let in.
        :return: a context manager; ``as grant`` gives a :class:`~sqlalchemy_locks.lease.Lease`: a ``Grant``, with
            ``grant.lost``, which is true as soon as their time may have run out, and ``grant.check()``, which asks the
            database. It decorates functions, too: each call then has a block of its own.
        :raises LockTimeout: as :meth:`acquire`.
        :raises ReentryError: when this thread or task holds, in blocks, so many that it would wait for itself; when
            another block of this process has this ``external_id``.
        :raises RequestHeld: when this ``external_id`` is held already, with ``resume=False``.
        :raises RequestOver: when this ``external_id`` was acquired before, and is over.
        :raises LockLost: at the end of the block, when the permits were lost inside it; an exception of the block's own
            is never replaced, and has it as a note (Python 3.11).
        :raises UnknownSemaphore: :raises IdempotencyConflict: as :func:`sqlalchemy_locks.semaphore.acquire`; the latter
            also for an ``external_id`` that was granted without a ``ttl``.

        An ``external_id`` that was granted before keeps the ``ttl`` that it was granted with, and whoever still renews
        it, or leaves a block that has it, does so for this one, too: it is for who comes again after a crash.

        A release that fails at the end of the block is logged under ``sqlalchemy_locks``: the permits come back when
        their time is over.

        The pattern: "Distributed Counting Semaphore with MySQL": heartbeats, and what is checked before each write.

        >>> write = update(Document).where(Document.id == 1).values(body=text)
        >>> with locks.semaphore("backup-slots", ttl=60, timeout=30) as grant:
        ...     if not grant.lost:
        ...         locks.run(sl.guarded(write, grant))
        True
        """
        return LeaseContext(self, permits, count, ttl, timeout, external_id, owner, resume=resume, reclaim=reclaim)

    def lease(
        self, name: str, *, ttl: float | timedelta = 60, timeout: float | timedelta | None = None
    ) -> LeaseContext:
        """Hold a lease while the block runs: a semaphore of one, made on first use. Everything as :meth:`semaphore`.

        :param name: of the semaphore; ``grant.fence[name]`` is the fencing token.
        :raises ReentryError: when this thread or task holds it already.
        :raises Unsupported: when there is a semaphore of that name, of another capacity than 1.

        Unlike :meth:`exclusive` it keeps no connection and no transaction while the block runs.

        >>> with locks.lease("nightly-import", ttl=60, timeout=0) as grant:
        ...     run_the_import(token=grant.fence["nightly-import"])
        """
        return LeaseContext(self, valid_name(name, "a lease's name"), None, ttl, timeout, None, None, alone=True)

    def _undisturbed(self, work: Callable[[], Any]) -> Any:
        """Do what has to be done because its caller was cancelled, and perhaps is so again."""
        return work()

    def _waiting(
        self,
        request: Operation[Any],
        patience: float | None,
        known: bool,
        own: Mapping[str, int],
        reclaims: bool = False,
    ) -> SemaphoreWaiter:
        return SemaphoreWaiter(self._engine, self._settled, self._sleep, request, patience, own, known, reclaims)

    def _granted(self, waiting: SemaphoreWaiter, known: bool, block: str | None = None) -> Grant:
        """Wait for room.

        :param known: whoever asks gave the id, and may have asked before.
        :param block: what the block is called that is about to be entered.
        """
        kind = block or "semaphore"
        asked = waiting.request._values
        ident, told = asked["external_id"], {"owner": asked["owner"], "external_id": asked["external_id"]}
        try:
            grant = waiting.granted()
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error}; its external_id is {ident!r}: ask again with it, or release it") from error
        except LockTimeout as error:
            # a try is to be cheap: who makes one, and wants to know, can ask
            holders = self._permit_holders(waiting.lacking) if waiting.patience else ()
            error.kind = kind
            late = LockTimeout(str(error), holders, kind) if holders else error
            self._tell("waited", kind, asked["permits"], waited=time.monotonic() - waiting.began, error=late, **told)
            if late is error:
                raise
            raise late from error
        except BaseException as error:
            if not known and not isinstance(error, Exception):
                # cancelled or interrupted, perhaps after it was granted: nobody else knows its id
                with contextlib.suppress(Exception):
                    self._undisturbed(lambda: self._settled(withdraw(ident)))
            raise
        if self._heard:
            waited = time.monotonic() - waiting.began
            try:
                self._tell("waited", kind, grant.permits, waited=waited, **told)
                # only of blocks it is timed: what has none may be given back by another process
                timed = waited if block else None
                self._tell("acquired", kind, grant.permits, waited=timed, fence=grant.fence, **told)
            except BaseException:
                if not known:
                    with contextlib.suppress(Exception):  # as above: nobody else knows its id
                        self._undisturbed(lambda: self._settled(semaphore.release(ident)))
                raise
        return grant

    def _permit_holders(self, names: Iterable[str]) -> tuple[PermitHolder, ...]:
        """Who holds permits of these, for the sentence of an error: what can be told at once, or nothing."""
        found: list[PermitHolder] = []
        if not has_room(self._engine):
            return ()
        with contextlib.suppress(Exception):
            short = ShortTransaction(self._engine)
            short.open(writes=False, wait=0, within=0)
            try:
                with short.backend.statement_timeout(short.connection):
                    for name in names:
                        rows = short.connection.execute(semaphore.holders(name)).all()
                        found += [_holder(name, row) for row in rows if not row.expired]
            finally:
                short.abandon()
        return tuple(found)

    def _renewals(self) -> RenewalThread:
        renewals: RenewalThread | None = self.__dict__.get("_renewals_")
        if renewals is None or renewals.process != os.getpid():
            renewals = self.__dict__["_renewals_"] = RenewalThread()
        return renewals

    def release(self, external_id: str | Grant) -> Released:
        """Give permits back: :func:`sqlalchemy_locks.semaphore.release`, in a transaction of its own.

        When its reply was lost, it is sent again, and ``ALREADY_RELEASED`` may be what the first one did.

        :raises LockTimeout: when a ``guarded`` write of this request is not committed for so long: for 5 seconds on
            PostgreSQL and YugabyteDB, for ``innodb_lock_wait_timeout`` or SQLite's timeout elsewhere. It is held still:
            release it again, and never inside the block that writes.

        >>> grant = locks.acquire({"network": 1})
        >>> locks.release(grant) is sl.Released.RELEASED
        True
        """
        released: Released = self._of_request(semaphore.release(external_id))
        if released is Released.RELEASED:
            self._told("released", external_id)
        return released

    def renew(self, external_id: str | Grant) -> bool:
        """Have the time of a request count from now: :func:`sqlalchemy_locks.semaphore.renew`.

        :return: ``False`` once its time ran out, or it was released: it is somebody else's then.
        :raises LockTimeout: as :meth:`release`.

        >>> grant = locks.acquire({"network": 1}, ttl=60)
        >>> locks.renew(grant)
        True
        """
        renewed = bool(self._of_request(semaphore.renew(external_id)))
        if not renewed:
            self._told("lost", external_id)
        return renewed

    def _told(self, what: str, request: str | Grant) -> None:
        # of an id nobody here knows what it was for
        if isinstance(request, Grant):
            ident = request.external_id
            self._tell(what, "semaphore", request.permits, external_id=ident, fence=request.fence)
        else:
            self._tell(what, "semaphore", (), external_id=request)

    def _of_request(self, operation: Operation[Any]) -> Any:
        # PostgreSQL waits without end for who writes under guarded; the others have a limit of their own, and one of
        # ours would be two more round trips
        if backend_for(self._engine.dialect).locking == "functions":
            operation = operation.execution_options(locks_wait=PATIENCE)
        return self._settled(operation)

    def sweep(self, *, stale_after: float | timedelta | None = DAY, alive: Alive | None = None) -> int:
        """Release what nobody will give back: what has expired, is stale, or whose owner is dead.

        :param stale_after: what was acquired without a time to live, and neither renewed nor released for that long,
            in seconds or as a ``timedelta``; ``None``: leave it alone. What has a time to live is judged by that
            alone, however long it is.
        :param alive: is given owners, up to 800 at once and each only once, and gives the living ones back. When it
            raises, nobody is released. ``AsyncLocks`` takes a coroutine function, too.
        :return: how many requests were released, with the permits, if there are any, that belong to no request.

        A lease that is renewed while this looks stays, and so does what somebody is releasing, or writing under
        ``guarded``. An ``acquire`` that finds no room takes back what has expired by itself, without any sweep.

        >>> locks.sweep(alive=lambda owners: [owner for owner in owners if is_running(owner)])
        """
        old = stale(stale_after)
        dead = [] if alive is None else self._dead(alive)
        swept: int = 0
        after = 0
        while judged := self._settled(overdue(old, after)):
            swept += self._settled(taken(judged))
            after = judged[-1][0]
        for start in range(0, len(dead), semaphore.BATCH):
            swept += self._settled(taken(dead[start : start + semaphore.BATCH]))
        swept += self._settled(strays())
        if swept:
            self._tell("swept", "semaphore", (), count=swept)
        return swept

    def _dead(self, alive: Alive) -> list[tuple[Any, ...]]:
        """The requests whose owners are dead, with what they were judged by."""
        verdicts: dict[str, bool] = {}
        dead: list[tuple[Any, ...]] = []
        after = 0
        while found := self._settled(owned(after)):
            unknown = sorted({owner for _, _, owner in found} - verdicts.keys())
            if unknown:
                living = _living(alive(unknown))
                verdicts |= {owner: owner in living for owner in unknown}
            dead += [(request, renewed_at) for request, renewed_at, owner in found if not verdicts[owner]]
            after = found[-1][0]
        return dead

    def _settled(self, operation: Operation[Any]) -> Any:
        """Run it, in autocommit where that is one round trip, unless the app's isolation level makes that fail."""
        if not self._sets_isolation:
            try:
                return self._run(operation, fresh_nonce())
            except DBAPIError as error:
                # an app at REPEATABLE READ: who waits there fails to serialize, however often it is retried
                if not backend_for(self._engine.dialect).transient(error):
                    raise
            self._sets_isolation = True
        return self._run(operation, fresh_nonce(), short=True)


def _holder(name: str, row: Any) -> PermitHolder:
    return PermitHolder(
        name=name,
        owner=row.owner,
        since=row.since,
        external_id=row.external_id,
        permits=row.permits,
        expires_at=row.expires_at,
    )


def _living(answer: Any) -> frozenset[str]:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        raise TypeError(
            f"alive gives the living ones of the owners that it was given, as a list or set, not {answer!r}"
        )
    living = answer if isinstance(answer, Collection) else list(answer)
    return frozenset(living)

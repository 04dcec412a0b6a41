"""``Locks``: the ready-made locks. It opens transactions, waits, retries and cleans up; it contains no SQL.

``AsyncLocks`` (``async_locks.py``) runs the same code in a greenlet, and awaits it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from sqlalchemy import Engine

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._forks import replace_pool_in_forks, shares_one_connection
from sqlalchemy_locks._validation import bounded_seconds, timeout_seconds, valid_name
from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.core.operation import Operation, RowsOperation
from sqlalchemy_locks.core.typing import ValueOperation
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.facade.exclusive import KeyBlock, Name
from sqlalchemy_locks.facade.host import LockHost
from sqlalchemy_locks.facade.lease import LeaseContext, LeaseRenewer
from sqlalchemy_locks.facade.maintenance import Maintenance, run_due_tasks
from sqlalchemy_locks.facade.mutexes import Mutexes
from sqlalchemy_locks.facade.semaphore_wait import SemaphoreWaiter
from sqlalchemy_locks.facade.sweep import DAY, Alive, sweep
from sqlalchemy_locks.runtime.decorators import check_plain
from sqlalchemy_locks.runtime.renewal import LeaseTimers
from sqlalchemy_locks.values import Grant, Released, Report

if TYPE_CHECKING:
    from sqlalchemy.orm import sessionmaker

T = TypeVar("T")
P = ParamSpec("P")


class Locks(LockHost):
    """Locks that open their own transactions, on the engine that the app already has.

    :param bind: an ``Engine``, or a ``sessionmaker`` bound to one: its class and options are then those of
        ``held.session``.
    :param owner: stored with what is acquired; by default made of the host, the process and a nonce.

    >>> locks = sl.Locks(engine)
    >>> with locks.exclusive("invoice:42", timeout=5) as held:
    ...     held.session.add(Payment(invoice=42))
    """

    mutex: Mutexes
    """The mutexes of the shipped table, created on first use."""

    def __init__(self, bind: Engine | sessionmaker[Any], *, owner: str | None = None) -> None:
        from sqlalchemy.orm import sessionmaker

        maker = bind if isinstance(bind, sessionmaker) else sessionmaker(bind)
        engine = maker.kw.get("bind")
        if not isinstance(engine, Engine):
            raise TypeError(
                "Locks takes an Engine, or a sessionmaker bound to one (AsyncLocks an AsyncEngine), not "
                f"{type(bind).__name__}"
            )
        if shares_one_connection(engine.pool):
            raise Unsupported(
                f"Locks can't work with a {type(engine.pool).__name__}, which shares one connection, and so one "
                "transaction, between checkouts: use another pool, and on SQLite a file instead of :memory:"
            )
        replace_pool_in_forks(engine)
        super().__init__(engine, maker, owner)
        self.mutex = Mutexes(self)
        #: renew the leases of blocks
        self._timers = LeaseTimers(partial(LeaseRenewer, self))

    def mutexes(self, mutex: Mutex) -> Mutexes:
        """As :attr:`mutex`, for mutexes on columns of your own, with a ``token`` among them; keep the returned object.

        :raises ValueError: without such a column: a release could not tell its own acquisition from another one.
        :raises TypeError: for anything but a :class:`Mutex`.

        >>> imports = locks.mutexes(sl.Mutex(Import, id=Import.name, acquired=Import.locked, token=Import.nonce))
        >>> imports.acquire("prices")
        """
        if not isinstance(mutex, Mutex):
            raise TypeError(f"mutexes takes a sl.Mutex, not {mutex!r}")
        return Mutexes(self, mutex)

    def once_per(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> bool:
        """Acquire the current period of a name, a :class:`Timeout` that is created on first use.

        :param every: the period, in whole seconds or as a ``timedelta``.
        :param windowed: one acquisition in each window of that length, as cron needs it. Otherwise the period must have
            passed since the last acquisition: a caller that comes once a period gets every second one.
        :param tz: :param queue: see :class:`Timeout`.
        :return: ``True`` at most once a period, among all processes.
        :raises OutcomeUnknown: when the connection died, and so did those of three more attempts.

        >>> if locks.once_per("hourly-report", every=3600, windowed=True):
        ...     send_report()
        """
        if every is None:
            raise TypeError("once_per needs a period: every=, in seconds or as a timedelta")
        acquired = self._acquire_period(Timeout(every=every, windowed=windowed, tz=tz), name, queue)
        if acquired:
            self._emit("acquired", "period", (name,))
        return acquired

    def scheduled(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
        """Decorate a function so that it runs at most once a period: each call asks :meth:`once_per`.

        :param every: :param windowed: :param tz: :param queue: as for :meth:`once_per`.
        :return: a decorator. A call returns ``None`` when the period was acquired before.
        :raises OutcomeUnknown: by a call, as :meth:`once_per`.

        >>> @locks.scheduled("daily-report", every=86400, windowed=True)
        ... def send_daily_report() -> None: ...
        """
        Timeout(every=every, windowed=windowed, tz=tz).acquire(name, queue=queue)  # refuses bad input before any call

        def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
            check_plain(function, f"scheduled({name!r})")

            @functools.wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
                due = self.once_per(name, every=every, windowed=windowed, tz=tz, queue=queue)
                return function(*args, **kwargs) if due else None

            return run

        return decorate

    def exclusive(self, *names: Name, timeout: float | timedelta | None = None) -> KeyBlock:
        """Hold keys exclusively while the block runs; a transaction holds them, and the block's end commits it.

        :param names: one or more keys, as :func:`sqlalchemy_locks.lock.exclusive` takes them; every block acquires them
            in the same order, so that two can't deadlock.
        :param timeout: the longest wait for all of them together, in seconds or as a ``timedelta`` (MySQL and MariaDB
            count whole seconds); ``None`` for no limit, ``0`` for a single attempt.
        :return: a context manager; ``as held`` gives a :class:`Held`. It decorates functions, too: each call then has a
            block of its own.
        :raises LockTimeout: when they could not be acquired in time; its ``holders`` are those of the keys, where the
            engine lists them, unless ``timeout`` is 0.
        :raises PoolTimeout: when no connection was free within the pool's own ``pool_timeout``.
        :raises ReentryError: when this thread or task holds one of them already (on SQLite: any lock). On SQLite every
            other call of ``Locks`` that writes raises it inside the block, too: there is one write lock.
        :raises LockLost: at the end of the block, when its transaction failed or the connection died, so that nothing
            is committed; or when it was ended inside the block, which commits or rolls back what was done before.
        :raises OutcomeUnknown: at the end of the block, when the connection died during COMMIT.

        Of the threads or tasks of this process that want the same first key, one waits on a connection, and the others
        in memory, in FIFO order.

        >>> with locks.exclusive("invoice:42", timeout=5) as held:
        ...     held.session.add(Payment(invoice=42))
        >>> @locks.exclusive("report")
        ... def report() -> None: ...
        """
        return KeyBlock(self, names, shared=False, timeout=timeout)

    def shared(self, *names: Name, timeout: float | timedelta | None = None) -> KeyBlock:
        """Hold keys together with other sharers while the block runs. All else as :meth:`exclusive`.

        Each sharer waits on a connection of its own.

        >>> with locks.shared("prices"):
        ...     read_prices()
        """
        return KeyBlock(self, names, shared=True, timeout=timeout)

    def acquire(
        self,
        permits: Mapping[str, int],
        *,
        external_id: str | None = None,
        owner: str | None = None,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
    ) -> Grant:
        """Acquire permits of one or more semaphores, all of them or none, waiting for room.

        :param permits: how many of each semaphore.
        :param external_id: the id of this request: a caller that gives it again gets the same grant. Generated by
            default.
        :param owner: the name that is stored as their holder; by default :attr:`owner`.
        :param ttl: how long they are held without being renewed, in seconds or as a ``timedelta``; ``None``: until
            they are released, or swept.
        :param timeout: the longest wait, in seconds or as a ``timedelta``; ``None`` for no limit, ``0`` for a single
            attempt (which may wait 5 seconds for rows that others have locked). MySQL and MariaDB wait for a locked
            row in whole seconds.
        :return: a :class:`~sqlalchemy_locks.Grant`, acquired.
        :raises LockTimeout: when there was no room in time; its ``holders`` are then those of the permits, unless
            ``timeout`` is 0. Also, at any time of the wait, when the request exceeds a capacity other than 0.
        :raises OutcomeUnknown: when the connection died, and so did those of three more attempts; it names the id.
        :raises RequestOver: when this id was acquired before, and was released or ran out: it is never granted again.
        :raises UnknownSemaphore: :raises IdempotencyConflict: as :func:`sqlalchemy_locks.semaphore.acquire`.

        Waiters are served in FIFO order.

        >>> grant = locks.acquire({"backup-slots": 1, "network": 2}, external_id="job-1", ttl=3600, timeout=10)
        >>> locks.release("job-1")
        """
        owner = self.owner if owner is None else owner
        request = semaphore.acquire(permits, external_id=external_id, owner=owner, ttl=ttl)
        return SemaphoreWaiter(self, request, timeout_seconds(timeout), own_id=external_id is not None).wait()

    def release(self, external_id: str | Grant) -> Released:
        """Release permits: :func:`sqlalchemy_locks.semaphore.release`, in a transaction of its own.

        After a lost reply the release is sent again: ``ALREADY_RELEASED`` may then report the effect of the first one.

        :raises LockTimeout: when a ``guarded`` write of this request stays uncommitted for 5 seconds on PostgreSQL and
            YugabyteDB, for ``innodb_lock_wait_timeout`` or SQLite's timeout elsewhere. The permits are still held:
            release them again, and never inside the block that writes.

        >>> grant = locks.acquire({"network": 1})
        >>> locks.release(grant) is sl.Released.RELEASED
        True
        """
        released: Released = self._run_on_request(semaphore.release(external_id))
        if released is Released.RELEASED:
            self._emit_of_request("released", external_id)
        return released

    def renew(self, external_id: str | Grant) -> bool:
        """Restart the time to live of a request: :func:`sqlalchemy_locks.semaphore.renew`.

        :return: ``False`` once its time ran out, or it was released: others may hold its permits then.
        :raises LockTimeout: as :meth:`release`.

        >>> grant = locks.acquire({"network": 1}, ttl=60)
        >>> locks.renew(grant)
        True
        """
        renewed = bool(self._run_on_request(semaphore.renew(external_id)))
        if not renewed:
            self._emit_of_request("lost", external_id)
        return renewed

    def _emit_of_request(self, what: str, request: str | Grant) -> None:
        if isinstance(request, Grant):
            names, ident, fence = request.permits, request.external_id, request.fence
            self._emit(what, "semaphore", names, external_id=ident, fence=fence)
        else:  # an id alone doesn't tell the semaphores
            self._emit(what, "semaphore", (), external_id=request)

    def semaphore(
        self,
        permits: str | Mapping[str, int],
        *,
        count: int | None = None,
        ttl: float | timedelta = 60,
        timeout: float | timedelta | None = None,
        external_id: str | None = None,
        owner: str | None = None,
    ) -> LeaseContext:
        """Hold permits of one or more semaphores while the block runs, renewed in the background.

        :param permits: a semaphore's name, or how many of each of several.
        :param count: how many permits of the one that is given by its name; 1 by default.
        :param ttl: how long they are held without renewal, after the process died or was stopped: in seconds or as a
            ``timedelta``, at least a second. They are renewed three times in that.
        :param timeout: :param owner: as for :meth:`acquire`.
        :param external_id: the id of the work in the block, if the work is to be done once. Only one caller with this
            id is inside at a time. The id is granted again after a block that was left by an exception, and after one
            whose process died, when its time has run out. It is never granted again after a block that has ended well.
        :return: a context manager; ``as grant`` gives a :class:`~sqlalchemy_locks.facade.lease.Lease`: a ``Grant``,
            with ``grant.lost``, which is true as soon as their time may have run out, and ``grant.check()``, which asks
            the database. It decorates functions, too: each call then has a block of its own.
        :raises LockTimeout: as :meth:`acquire`.
        :raises ReentryError: when this thread or task holds, in blocks, so many permits that waiting would deadlock.
        :raises RequestHeld: when another caller is inside with this ``external_id``, or holds it by :meth:`acquire`.
        :raises RequestOver: when a block with this ``external_id`` has ended well, or it was released otherwise.
        :raises LockLost: at the end of the block, when the permits were lost inside it; an exception of the block's own
            is never replaced, and gets it as a note (Python 3.11).
        :raises UnknownSemaphore: :raises IdempotencyConflict: as :func:`sqlalchemy_locks.semaphore.acquire`.

        A holder that was stopped for longer than its ``ttl`` may continue beside the next holder of its id. ``lost`` is
        then true, and its ``grant`` releases, renews and guards nothing of the next holder. For work that must never
        run twice, not even after a crash, use a :attr:`mutex`, or a row of yours.

        A release that fails at the end of the block is logged under ``sqlalchemy_locks``: the permits expire.

        >>> write = update(Document).where(Document.id == 1).values(body=text)
        >>> with locks.semaphore("backup-slots", ttl=60, timeout=30) as grant:
        ...     if not grant.lost:
        ...         locks.run(sl.guarded(write, grant))
        True
        """
        return LeaseContext(
            self, self._timers, permits, count=count, ttl=ttl, timeout=timeout, external_id=external_id, owner=owner
        )

    def lease(
        self, name: str, *, ttl: float | timedelta = 60, timeout: float | timedelta | None = None
    ) -> LeaseContext:
        """Hold a lease while the block runs: a semaphore of one, created on first use. All else as :meth:`semaphore`.

        :param name: of the semaphore; ``grant.fence[name]`` is the fencing token.
        :param ttl: :param timeout: as for :meth:`semaphore`.
        :raises ReentryError: when this thread or task holds it already.
        :raises Unsupported: when there is a semaphore of that name, of another capacity than 1.

        Unlike :meth:`exclusive` it keeps no connection and no transaction while the block runs.

        >>> with locks.lease("nightly-import", ttl=60, timeout=0) as grant:
        ...     run_the_import(token=grant.fence["nightly-import"])
        """
        return LeaseContext(
            self, self._timers, valid_name(name, "a lease's name"), ttl=ttl, timeout=timeout, single=True
        )

    def sweep(self, *, stale_after: float | timedelta | None = DAY, alive: Alive | None = None) -> int:
        """Release requests that their holders will not release: expired ones, stale ones, and those of dead owners.

        :param stale_after: requests without a time to live that were neither renewed nor released for that long, in
            seconds or as a ``timedelta``, are stale; ``None``: none is. Requests with a time to live are never stale,
            however long it is: they expire.
        :param alive: receives owners, up to 800 in one call and each only once, and returns those that are alive. When
            it raises, no request of a dead owner is released. ``AsyncLocks`` takes a coroutine function, too.
        :return: how many requests were released.

        A sweep leaves a lease that is renewed meanwhile, and a request that is locked by its release or by a
        ``guarded`` write. An ``acquire`` that finds no room releases expired permits by itself, without any sweep.

        >>> locks.sweep(alive=lambda owners: [owner for owner in owners if is_running(owner)])
        """
        return sweep(self, stale_after, alive)

    def maintain(self, *, alive: Alive | None = None) -> Report:
        """Run every sweep and clean-up that is due, and that no other process has run in its period.

        - Every minute: captured tasks of the shipped table whose own ``timeout`` has passed get the status ``timeout``.
        - Every 5 minutes: requests are released that have expired, whose owner is dead (``alive``, as for
          :meth:`sweep`), or that have no time to live and are older than a day.
        - Every 4 hours: requests that were released 7 days ago are deleted.
        - Every day: semaphores of leases that were unused for 7 days, changes of capacity that are 30 days old, and
          keys that no transaction holds are deleted.

        Stalled jobs are returned to their queue by its workers.

        :return: a :class:`~sqlalchemy_locks.Report`: for each task that was due, how many rows it has handled.

        A task that fails doesn't keep the others from running; its error is raised after them.

        >>> locks.maintain().done
        {'tasks': 0, 'orphans': 0, 'requests': 0, 'leases': 0, 'history': 0, 'keys': 0}
        """
        return run_due_tasks(self, alive)

    def maintenance(self, *, alive: Alive | None = None, every: float | timedelta = 60) -> Maintenance:
        """Call :meth:`maintain` in the background while the block runs.

        :param alive: as for :meth:`sweep`.
        :param every: how often to ask whether a task is due, in seconds or as a ``timedelta``.

        Errors are logged under ``sqlalchemy_locks``, and the task is tried again when it is due again.

        >>> with locks.maintenance():
        ...     serve()
        """
        return Maintenance(lambda: self.maintain(alive=alive), bounded_seconds(every, "every", zero=False))

    @overload
    def run(self, operation: RowsOperation[tuple[T]]) -> list[T]: ...
    @overload
    def run(self, operation: RowsOperation[T]) -> list[T]: ...
    @overload
    def run(self, operation: ValueOperation[tuple[T]]) -> T | None: ...
    @overload
    def run(self, operation: ValueOperation[T]) -> T | None: ...
    def run(self, operation: Any) -> Any:
        """Run one operation in a short transaction of its own, retried on transient errors.

        :param operation: any operation whose effect outlives its transaction.
        :return: what ``session.scalar`` would return for it. For one that gives rows, a list: of values or entities
            (detached), as ``session.scalars`` gives them, or of rows of more than one value.
        :raises TypeError: for anything else.
        :raises Unsupported: for a lock, which would be released when this returns: use :meth:`exclusive` or a session.
        :raises OutcomeUnknown: when the connection died, the operation can't be repeated, or no retry succeeded.

        >>> locks.run(sl.lock.vacuum())
        0
        """
        if not isinstance(operation, Operation):
            raise TypeError(f"run() takes an operation of this library, such as mutex.acquire(id), not {operation!r}")
        impl = operation._impl
        if impl.held_by is not None:
            raise Unsupported(
                f"{impl.name} ends with its {impl.held_by}, so run() would release the lock when it returns: use "
                "locks.exclusive() or locks.shared(), or execute it in a transaction of your own"
            )
        return self._run(operation)

"""The results of operations that are more than a bool or a number: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal
from uuid import UUID


class Released(str, Enum):
    """The outcome of a release.

    >>> grant = locks.acquire({"network": 1})
    >>> locks.release(grant) is sl.Released.RELEASED, locks.release(grant) is sl.Released.ALREADY_RELEASED
    (True, True)
    """

    #: it was held, and is now released
    RELEASED = "RELEASED"
    #: it had been released or swept before
    ALREADY_RELEASED = "ALREADY_RELEASED"
    #: nothing was ever acquired with this id, or its record has been cleaned up
    UNKNOWN = "UNKNOWN"

    __str__ = str.__str__


@dataclass(frozen=True)
class Grant:
    """The answer to a request for permits; true when they are held.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 2}, external_id="job-1", ttl=3600))
    >>> grant.acquired, grant.state, grant.permits, grant.fence
    (True, 'ACQUIRED', {'network': 2}, {'network': 1})
    """

    external_id: str
    #: whether all of them are held; otherwise none is
    acquired: bool
    #: ``ACQUIRED``; ``DENIED``, when there was no room; for an id that was used before also ``RELEASED``, and
    #: ``EXPIRED`` when its time has run out and the permits are not swept yet
    state: str
    #: the count of each semaphore
    permits: Mapping[str, int] = field(hash=False)
    #: the fencing token of each: strictly increasing for each semaphore, in the order of the grants
    fence: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: the semaphores that had no room
    exhausted: tuple[str, ...] = ()
    #: it repeats the answer to an earlier request with this id
    replayed: bool = False
    #: when it ends unless it is renewed, in UTC by the server's clock; ``None``: not before it is released. The value
    #: at grant time; renewals do not update it
    expires_at: datetime | None = None
    #: a nonce that identifies this request, also among requests with the same id. (The number of its row would not do:
    #: it is used again when the transaction that inserted the row was rolled back.)
    token: str | None = None
    #: the capacity of each semaphore when the permits were acquired; empty when it repeats an earlier answer
    capacities: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.acquired


@dataclass(frozen=True)
class Report:
    """The result of one round of maintenance: the number of rows of each task that was due.

    >>> report = locks.maintain()
    >>> bool(report), sum(report.done.values())
    (False, 0)
    """

    done: Mapping[str, int]

    def __bool__(self) -> bool:
        return any(self.done.values())


@dataclass(frozen=True)
class Holder:
    """A holder, as far as the engine shows it; an attribute that it doesn't show is ``None``.

    >>> try:
    ...     with locks.exclusive("report", timeout=5):
    ...         send_report()
    ... except sl.LockTimeout as error:
    ...     for holder in error.holders:
    ...         print(holder.name, holder.owner, holder.since)
    """

    #: the name or key that the query was for, else the key (names aren't stored)
    name: str | int
    #: the owner of permits; for a key the session's name (PostgreSQL's ``application_name``, MySQL's
    #: ``program_name``)
    owner: str | None
    #: when it was acquired, in UTC by the server's clock; for a key the start of its transaction, which was earlier
    since: datetime | None

    def __str__(self) -> str:
        owner = self.owner or "an unnamed owner"
        return owner if self.since is None else f"{owner} since {self.since:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class KeyWaiter:
    """A waiter for a key.

    >>> for holder in locks.run(sl.lock.holders("invoice:42")):
    ...     print([waiter.session for waiter in holder.waiting])
    """

    mode: Literal["exclusive", "shared"]
    #: the server's id of the session
    session: int | None
    owner: str | None
    user: str | None
    host: str | None
    since: datetime | None
    #: the ids of the sessions that it waits for: holders, and earlier waiters
    waits_for: tuple[int, ...]


@dataclass(frozen=True)
class KeyHolder(Holder):
    """A holder of a key of :func:`sqlalchemy_locks.lock.exclusive` or ``shared``.

    >>> with locks.exclusive("invoice:42"):
    ...     [holder] = locks.run(sl.lock.holders("invoice:42"))
    >>> holder.name, holder.mode, holder.waiting
    ('invoice:42', 'exclusive', ())
    """

    key: int
    mode: Literal["exclusive", "shared"]
    #: the server's id of the session: PostgreSQL's pid, MySQL's connection id
    session: int | None
    user: str | None
    host: str | None
    #: the session's state as the server names it: ``idle in transaction``, ``Sleep``
    state: str | None
    #: the waiters for the key in FIFO order
    waiting: tuple[KeyWaiter, ...] = ()
    #: ``semaphore`` or ``lease``: the key belongs to the queue for permits of ``name``. Each process has one waiter in
    #: this queue, and the first waiter holds the key
    kind: Literal["lock", "semaphore", "lease"] = "lock"

    def __str__(self) -> str:
        account = self.user or "" if self.host is None else f"{self.user or ''}@{self.host}"
        details = ", ".join(part for part in (self.owner, account, self.state) if part)
        session = f"session {self.session}" if self.session is not None else "a prepared transaction"
        since = "" if self.since is None else f" since {self.since:%Y-%m-%d %H:%M:%S} UTC"
        first = "" if self.kind == "lock" else f"first waiter of {self.kind} {self.name}: "
        return f"{first}{session}{f' ({details})' if details else ''}{since}"


@dataclass(frozen=True)
class PermitHolder(Holder):
    """A holder of permits of a semaphore.

    >>> try:
    ...     locks.acquire({"network": 1}, timeout=5)
    ... except sl.LockTimeout as error:
    ...     print([(holder.owner, holder.permits) for holder in error.holders])
    Grant(...)
    """

    external_id: str
    permits: int
    #: when they expire unless they are renewed; ``None``: not before they are released
    expires_at: datetime | None

    def __str__(self) -> str:
        until = "" if self.expires_at is None else f" until {self.expires_at:%Y-%m-%d %H:%M:%S} UTC"
        return f"{super().__str__()}{until} ({self.permits} as {self.external_id!r})"


@dataclass(frozen=True)
class JobEvent:
    """An event of a worker's job, for listeners; an attribute that doesn't apply is ``None``.

    >>> from sqlalchemy import event
    >>> @event.listens_for(worker, "completed")
    ... def on_completed(event: sl.JobEvent) -> None:
    ...     log.info("%s after %s s", event.external_id, event.took)
    """

    #: ``begun``, ``completed``, ``failed``, ``dead`` or ``stalled``
    event: str
    #: the queue's name
    queue: str
    #: e.g. ``PostgreSQL``
    engine: str
    #: the worker's ``processing_host``
    host: str
    external_id: UUID | None = None
    #: the number of this attempt, 1 for the first
    attempt: int | None = None
    #: from the job's ``run_at`` to its capture, in seconds, by the server's clock
    waited: float | None = None
    #: how long its handler has run, in seconds
    took: float | None = None
    #: the number of jobs; for ``stalled`` the jobs of silent workers
    count: int = 1
    error: BaseException | None = field(default=None, hash=False)

    def __str__(self) -> str:
        jobs = f"{self.count} job{'' if self.count == 1 else 's'}"
        job = jobs if self.external_id is None else f"job {self.external_id}"
        parts = [f"{self.event} {job} of the queue {self.queue!r}"]
        parts += [] if self.attempt is None else [f"attempt {self.attempt}"]
        parts += [f"{what} {took:.3f} s" for what, took in (("waited", self.waited), ("took", self.took)) if took]
        if self.error is not None:
            parts.append(f"{type(self.error).__name__}: {self.error}")
        return "; ".join(parts)


@dataclass(frozen=True)
class LockEvent:
    """An event of a lock, for listeners; an attribute that doesn't apply is ``None``.

    >>> from sqlalchemy import event
    >>> @event.listens_for(locks, "acquired")
    ... def on_acquired(event: sl.LockEvent) -> None:
    ...     log.info("%s after %s s", event.names, event.waited)
    """

    #: ``waited``, ``acquired``, ``released``, ``lost``, ``retried``, ``swept`` or ``acted``
    event: str
    #: ``lock``, ``semaphore``, ``lease``, ``mutex``, ``period``; for ``retried`` the operation, e.g. ``mutex.acquire``
    kind: str
    names: tuple[str | int, ...]
    #: e.g. ``PostgreSQL``
    engine: str
    owner: str
    #: it is a shared lock
    shared: bool = False
    #: how long the acquire took, successful or not, in seconds
    waited: float | None = None
    #: how long it was held, in seconds
    held: float | None = None
    #: the fencing token; for permits one of each semaphore
    fence: int | Mapping[str, int] | None = field(default=None, hash=False)
    #: the id of the request, for permits
    external_id: str | None = None
    #: the number of swept rows; for ``retried`` the number of the attempt
    count: int | None = None
    error: BaseException | None = field(default=None, hash=False)

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names))
        parts = [f"{self.event} {self.kind}{' (shared)' if self.shared else ''}{f' {names}' if names else ''}"]
        parts += [] if self.external_id is None else [f"request {self.external_id!r}"]
        parts += [f"{what} {took:.3f} s" for what, took in (("waited", self.waited), ("held", self.held)) if took]
        parts += [f"{what} {number}" for what, number in (("fence", self.fence), ("count", self.count)) if number]
        if self.error is not None:
            parts.append(f"{type(self.error).__name__}: {self.error}")
        return "; ".join(parts)

"""What operations come back with where a bool or a number would not say enough: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal


class Released(str, Enum):
    """What became of a release.

    >>> grant = locks.acquire({"network": 1})
    >>> locks.release(grant) is sl.Released.RELEASED, locks.release(grant) is sl.Released.ALREADY_RELEASED
    (True, True)
    """

    #: it held until now
    RELEASED = "RELEASED"
    #: it was released before, taken back or swept
    ALREADY_RELEASED = "ALREADY_RELEASED"
    #: nothing was ever acquired under this id, or it was long ago and is cleaned up
    UNKNOWN = "UNKNOWN"

    __str__ = str.__str__


@dataclass(frozen=True)
class Grant:
    """What came of asking for permits; true in a condition when they are held.

    >>> grant = session.scalar(sl.semaphore.acquire({"network": 2}, external_id="job-1", ttl=3600))
    >>> grant.acquired, grant.state, grant.permits, grant.fence
    (True, 'ACQUIRED', {'network': 2}, {'network': 1})
    """

    external_id: str
    #: whether they are held: all of them, or none
    acquired: bool
    #: ``ACQUIRED``; ``DENIED``, where there was no room; for an id that was asked for before also ``RELEASED``, and
    #: ``EXPIRED`` when its time ran out and nobody has taken the permits back yet
    state: str
    #: how many of each semaphore
    permits: Mapping[str, int] = field(hash=False)
    #: the fencing token of each: strictly increasing for each semaphore, in the order of the grants
    fence: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: the semaphores that had no room
    exhausted: tuple[str, ...] = ()
    #: it had been decided before, by an earlier request with this id
    replayed: bool = False
    #: when it ends unless it is renewed, in UTC by the server's clock; ``None``: when it is released
    expires_at: datetime | None = None
    #: what tells this request from any other, of the same id too: a nonce, since the number of a row is given again
    #: where the transaction that drew it was rolled back
    token: str | None = None

    def __bool__(self) -> bool:
        return self.acquired


@dataclass(frozen=True)
class Report:
    """What one round of maintenance did: for each task that was due, how many rows it was about.

    >>> report = locks.maintain()
    >>> bool(report), sum(report.done.values())
    (False, 0)
    """

    done: Mapping[str, int]

    def __bool__(self) -> bool:
        return any(self.done.values())


@dataclass(frozen=True)
class Holder:
    """Who holds something, as far as the engine tells it; what it doesn't tell is ``None``.

    >>> try:
    ...     with locks.exclusive("report", timeout=5):
    ...         send_report()
    ... except sl.LockTimeout as error:
    ...     for holder in error.holders:
    ...         print(holder.name, holder.owner, holder.since)
    """

    #: what is held: the name or key that was asked for, and the key where nobody named one (names aren't stored)
    name: str | int
    #: who: the owner of permits; for a key what the session calls itself (PostgreSQL's ``application_name``, MySQL's
    #: ``program_name``)
    owner: str | None
    #: since when, in UTC by the server's clock: a key at most so long, since that is when its transaction began
    since: datetime | None

    def __str__(self) -> str:
        who = self.owner or "somebody"
        return who if self.since is None else f"{who} since {self.since:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class KeyWaiter:
    """Who waits for a key.

    >>> for holder in locks.run(sl.lock.holders("invoice:42")):
    ...     print([waiter.session for waiter in holder.waiting])
    """

    mode: Literal["exclusive", "shared"]
    #: the server's number of the session
    session: int | None
    owner: str | None
    user: str | None
    host: str | None
    since: datetime | None
    #: the sessions that it waits for: holders, and who came first
    waits_for: tuple[int, ...]


@dataclass(frozen=True)
class KeyHolder(Holder):
    """Who holds a key of :func:`sqlalchemy_locks.lock.exclusive` or ``shared``.

    >>> with locks.exclusive("invoice:42"):
    ...     [holder] = locks.run(sl.lock.holders("invoice:42"))
    >>> holder.name, holder.mode, holder.waiting
    ('invoice:42', 'exclusive', ())
    """

    key: int
    mode: Literal["exclusive", "shared"]
    #: the server's number of the session: PostgreSQL's pid, MySQL's connection id
    session: int | None
    user: str | None
    host: str | None
    #: what the session does, in the server's words: ``idle in transaction``, ``Sleep``
    state: str | None
    #: who waits for the key, who came first at the head
    waiting: tuple[KeyWaiter, ...] = ()

    def __str__(self) -> str:
        at = self.user or "" if self.host is None else f"{self.user or ''}@{self.host}"
        who = ", ".join(part for part in (self.owner, at, self.state) if part)
        session = f"session {self.session}" if self.session is not None else "a prepared transaction"
        since = "" if self.since is None else f" since {self.since:%Y-%m-%d %H:%M:%S} UTC"
        return f"{session}{f' ({who})' if who else ''}{since}"


@dataclass(frozen=True)
class PermitHolder(Holder):
    """Who holds permits of a semaphore.

    >>> try:
    ...     locks.acquire({"network": 1}, timeout=5)
    ... except sl.LockTimeout as error:
    ...     print([(holder.owner, holder.permits) for holder in error.holders])
    Grant(...)
    """

    external_id: str
    permits: int
    #: when they come back unless they are renewed; ``None``: when they are released
    expires_at: datetime | None

    def __str__(self) -> str:
        until = "" if self.expires_at is None else f" until {self.expires_at:%Y-%m-%d %H:%M:%S} UTC"
        return f"{super().__str__()}{until} ({self.permits} as {self.external_id!r})"


@dataclass(frozen=True)
class LockEvent:
    """What happened to a lock, as listeners are told it; what has no meaning for it is ``None``.

    >>> from sqlalchemy import event
    >>> @event.listens_for(locks, "acquired")
    ... def told(event: sl.LockEvent) -> None:
    ...     log.info("%s after %s s", event.names, event.waited)
    """

    #: ``waited``, ``acquired``, ``released``, ``lost``, ``retried`` or ``swept``
    event: str
    #: ``lock``, ``semaphore``, ``lease``, ``mutex``, ``timeout``; for ``retried`` the operation, e.g. ``mutex.acquire``
    kind: str
    names: tuple[str | int, ...]
    #: as sentences call it, e.g. ``PostgreSQL``
    engine: str
    owner: str
    #: held together with other sharers
    shared: bool = False
    #: how long it took to have it, or to give up, in seconds
    waited: float | None = None
    #: how long it was held, in seconds
    held: float | None = None
    #: the fencing token; for permits one of each semaphore
    fence: int | Mapping[str, int] | None = field(default=None, hash=False)
    #: of permits, the id of their request
    external_id: str | None = None
    #: how many were swept; the how-maniest retry
    count: int | None = None
    error: BaseException | None = field(default=None, hash=False)

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names))
        told = [f"{self.event} {self.kind}{' (shared)' if self.shared else ''}{f' {names}' if names else ''}"]
        told += [] if self.external_id is None else [f"request {self.external_id!r}"]
        told += [f"{what} {took:.3f} s" for what, took in (("waited", self.waited), ("held", self.held)) if took]
        told += [f"{what} {number}" for what, number in (("fence", self.fence), ("count", self.count)) if number]
        if self.error is not None:
            told.append(f"{type(self.error).__name__}: {self.error}")
        return "; ".join(told)

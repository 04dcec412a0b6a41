"""What operations come back with where a bool or a number would not say enough: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum


class Released(str, Enum):
    """What became of a release."""

    #: it held until now
    RELEASED = "RELEASED"
    #: it was released before, taken back or swept
    ALREADY_RELEASED = "ALREADY_RELEASED"
    #: nothing was ever acquired under this id, or it was long ago and is cleaned up
    UNKNOWN = "UNKNOWN"

    __str__ = str.__str__


@dataclass(frozen=True)
class Grant:
    """What came of asking for permits; true in a condition when they are held."""

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
    request_id: int | None = None

    def __bool__(self) -> bool:
        return self.acquired


@dataclass(frozen=True)
class Report:
    """What one round of maintenance did: for each task that was due, how many rows it was about."""

    done: Mapping[str, int]

    def __bool__(self) -> bool:
        return any(self.done.values())

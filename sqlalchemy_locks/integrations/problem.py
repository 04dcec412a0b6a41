"""What an HTTP service answers when a lock was not to be had: a status, headers, and a body of ``problem+json``.

For any framework; this module knows none. What is promised: the answer tells what the client can do next, and nothing
of the server. Who has the lock, on which host, and what a driver said are in the error, which is for the log; they are
in the answer only when they are asked for (``reveal``).

The source: RFC 9457 (problem details), RFC 4918 (423), RFC 6585 (429), RFC 9110 (``Retry-After``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.errors import (
    IdempotencyConflict,
    LockError,
    LockLost,
    LockTimeout,
    MustRollback,
    NotWritable,
    OutcomeUnknown,
    PoolTimeout,
    RequestHeld,
    RequestOver,
    SemaphoreHeld,
    StaleToken,
    UnknownRow,
)

__all__ = ["Kind", "Problem", "kind_of", "problem", "problem_of"]

MEDIA_TYPE = "application/problem+json"
#: what a type begins with; what follows is the code
TYPES = "urn:problem-type:sqlalchemy-locks:"
#: seconds to come again in, where nothing better is known: locks are held for a transaction, permits for some work
LOCK_RETRY, SEMAPHORE_RETRY = 1, 5
#: no client is told to stay away for longer, however long the wait was that it made in vain
LONGEST_RETRY = 60


@dataclass(frozen=True)
class Kind:
    """One kind of problem: what its ``type`` ends with, its status, and what a client is told.

    >>> closed = Kind("closed", 503, "Closed", "We are closed on Sundays.", retry=3600)
    """

    code: str
    status: int
    title: str
    detail: str
    #: the client may come again with the same request, after so many seconds
    retry: int | None = None


LOCKED = Kind("locked", 423, "Locked", "Another request is working on this. Try again later.", LOCK_RETRY)
NO_ROOM = Kind(
    "no-room",
    429,
    "Too many at once",
    "As many as are allowed at once are under way. Try again later.",
    SEMAPHORE_RETRY,
)
IN_PROGRESS = Kind(
    "in-progress", 409, "Under way", "A request with this idempotency key is under way.", SEMAPHORE_RETRY
)
ANOTHER_REQUEST = Kind(
    "another-request", 409, "Another request's key", "This idempotency key was used before, for something else."
)
KEY_SPENT = Kind(
    "key-spent", 409, "Key used up", "The request with this idempotency key is over; use another key for another one."
)
HELD = Kind("held", 409, "In use", "Some of this is still in use.", SEMAPHORE_RETRY)
SUPERSEDED = Kind("superseded", 409, "Superseded", "A newer request has written already; this one changed nothing.")
NOT_FOUND = Kind("not-found", 404, "Not found", "There is no such thing to lock.")
BAD_NAME = Kind("bad-name", 422, "Not a name", "A value of this request can't be part of a lock's name.")
LOST = Kind("lost", 503, "Lost", "The lock was lost before the work was done. Try again later.", LOCK_RETRY)
UNKNOWN_OUTCOME = Kind(
    "outcome-unknown",
    503,
    "Outcome unknown",
    "The database was cut off: this was done, or it was not. Look before you ask again.",
)
UNAVAILABLE = Kind("unavailable", 503, "Unavailable", "Locks can't be had at the moment. Try again later.", LOCK_RETRY)
FAILED = Kind("failed", 500, "Internal Server Error", "The lock could not be asked for.")

#: the first that an error is one of
_KINDS: tuple[tuple[type[LockError], Kind], ...] = (
    (PoolTimeout, UNAVAILABLE),
    (LockTimeout, LOCKED),
    (IdempotencyConflict, ANOTHER_REQUEST),
    (RequestHeld, IN_PROGRESS),
    (RequestOver, KEY_SPENT),
    (OutcomeUnknown, UNKNOWN_OUTCOME),
    (LockLost, LOST),
    (SemaphoreHeld, HELD),
    (StaleToken, SUPERSEDED),
    (UnknownRow, NOT_FOUND),
    (NotWritable, UNAVAILABLE),
    (MustRollback, UNAVAILABLE),
)


@dataclass(frozen=True)
class Problem:
    """An answer: ``status``, ``headers`` (the content's type among them), and ``body``, to be sent as JSON.

    >>> answer = problem_of(sl.LockTimeout("'invoice:42' was not free within 5 s"))
    >>> answer.code, answer.headers["Content-Type"]
    ('locked', 'application/problem+json')
    >>> answer.content
    b'{"type":"urn:problem-type:sqlalchemy-locks:locked","title":"Locked","status":423,...}'
    """

    status: int
    headers: Mapping[str, str] = field(hash=False)
    body: Mapping[str, Any] = field(hash=False)

    @property
    def code(self) -> str:
        """What its ``type`` ends with, e.g. ``locked``."""
        return str(self.body["type"]).removeprefix(TYPES)

    @property
    def content(self) -> bytes:
        """The body as it is sent."""
        return json.dumps(self.body, separators=(",", ":")).encode()


def kind_of(error: LockError) -> Kind:
    """Which kind of problem an error is.

    A lock, a mutex or a lease that another has is *locked* (423); a semaphore without room has *no room* (429); a
    pool without a free connection is *unavailable* (503). What
    only who runs the service can mend (a semaphore that was never created, tables that are not installed) *failed*
    (500).

    >>> kind_of(sl.LockTimeout("no room", kind="semaphore")).status
    429
    """
    if isinstance(error, LockTimeout) and error.kind == "semaphore" and not isinstance(error, PoolTimeout):
        return NO_ROOM
    return next((kind for known, kind in _KINDS if isinstance(error, known)), FAILED)


def problem_of(
    error: LockError,
    *,
    retry_after: float | timedelta | None = None,
    instance: str | None = None,
    reveal: bool = False,
) -> Problem:
    """What to answer a request that met with an error of this library.

    :param retry_after: what ``Retry-After`` tells, in seconds or as a ``timedelta``, rounded up; by default 1 for what
        is locked and 5 for what has no room. It is told only where coming again helps.
    :param instance: which request it was, as a URI reference.
    :param reveal: tell the error's own sentence, with owners, hosts and names, instead of a general one.
    :raises ValueError: for a ``retry_after`` below 0.

    >>> problem = problem_of(sl.LockTimeout("'invoice:42' was not free within 5 s"))
    >>> problem.status, problem.headers["Retry-After"]
    (423, '1')
    """
    return problem(kind_of(error), retry_after=retry_after, instance=instance, detail=str(error) if reveal else None)


def problem(
    kind: Kind,
    *,
    retry_after: float | timedelta | None = None,
    instance: str | None = None,
    detail: str | None = None,
) -> Problem:
    """As :func:`problem_of`, of a kind that is known; ``detail`` is told instead of the general sentence.

    >>> closed = Kind("closed", 503, "Closed", "We are closed on Sundays.", retry=3600)
    >>> problem(closed, retry_after=1800).headers["Retry-After"]
    '1800'
    """
    body: dict[str, Any] = {
        "type": TYPES + kind.code,
        "title": kind.title,
        "status": kind.status,
        "detail": detail or kind.detail,
    }
    if instance is not None:
        body["instance"] = instance
    # no cache may answer the next client with what was so for this one
    headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
    if kind.retry is not None:
        headers["Retry-After"] = str(kind.retry if retry_after is None else whole(retry_after))
    return Problem(kind.status, headers, body)


def whole(retry_after: float | timedelta) -> int:
    """What ``Retry-After`` tells: whole seconds, rounded up."""
    return math.ceil(bounded_seconds(retry_after, "retry_after"))


def retry_of(kind: Kind, timeout: float | None) -> int | None:
    """When to come again, after a wait of so many seconds (``None``: as long as it took): not sooner than it took."""
    if kind not in (LOCKED, NO_ROOM) or kind.retry is None or timeout is None:
        return kind.retry
    return max(kind.retry, min(math.ceil(timeout), LONGEST_RETRY))

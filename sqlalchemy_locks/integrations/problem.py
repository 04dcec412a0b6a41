"""Answers of an HTTP service to errors of this library: a status, headers, and a body of ``problem+json``.

For any framework. An answer tells a client what to do next, and nothing about the server: the error itself, with the
lock's holder, its host and the driver's message, is for the log.

Sources: RFC 9457 (problem details), RFC 4918 (423), RFC 6585 (429), RFC 9110 (``Retry-After``).
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
#: the beginning of a problem's type; the code follows
TYPES = "urn:problem-type:sqlalchemy-locks:"
#: the default Retry-After in seconds: locks are held for a transaction, permits for a piece of work
LOCK_RETRY, SEMAPHORE_RETRY = 1, 5
#: the longest Retry-After in seconds that follows from the length of a wait
LONGEST_RETRY = 60


@dataclass(frozen=True)
class Kind:
    """A kind of problem: the end of its ``type``, its status, and the text for the client.

    >>> closed = Kind("closed", 503, "Closed", "We are closed on Sundays.", retry=3600)
    """

    code: str
    status: int
    title: str
    detail: str
    #: seconds after which the client may repeat the request; ``None`` where repeating doesn't help
    retry: int | None = None


LOCKED = Kind("locked", 423, "Locked", "Another request is working on this. Try again later.", LOCK_RETRY)
NO_ROOM = Kind(
    "no-room",
    429,
    "Too many at once",
    "The maximum number of requests is being processed. Try again later.",
    SEMAPHORE_RETRY,
)
IN_PROGRESS = Kind(
    "in-progress", 409, "In progress", "A request with this idempotency key is being processed.", SEMAPHORE_RETRY
)
ANOTHER_REQUEST = Kind(
    "another-request", 409, "Another request's key", "This idempotency key was used before, for something else."
)
KEY_SPENT = Kind(
    "key-spent", 409, "Key used up", "The request with this idempotency key has ended; use a new key for a new request."
)
#: for a service that stores its answers: the answer may have been stored since the service looked for it
ANSWERED = Kind(
    "key-spent",
    409,
    "Key used up",
    "The request with this idempotency key has ended. Ask again for its answer; use a new key only for a new request.",
    LOCK_RETRY,
)
HELD = Kind("held", 409, "In use", "Some of this is still in use.", SEMAPHORE_RETRY)
SUPERSEDED = Kind("superseded", 409, "Superseded", "A newer request has already written; this one changed nothing.")
NOT_FOUND = Kind("not-found", 404, "Not found", "There is no such resource to lock.")
BAD_NAME = Kind("bad-name", 422, "Not a name", "A value of this request can't be part of a lock's name.")
LOST = Kind("lost", 503, "Lost", "The lock was lost before the work was done. Try again later.", LOCK_RETRY)
UNKNOWN_OUTCOME = Kind(
    "outcome-unknown",
    503,
    "Outcome unknown",
    "The connection to the database was lost: this may or may not have been done. Check before you try again.",
)
UNAVAILABLE = Kind(
    "unavailable", 503, "Unavailable", "The lock service is temporarily unavailable. Try again later.", LOCK_RETRY
)
FAILED = Kind("failed", 500, "Internal Server Error", "The lock could not be requested.")

#: the first entry that matches an error applies
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
    """An answer: ``status``, ``headers`` (with the content type), and ``body``, to be sent as JSON.

    >>> answer = problem_of(sl.LockTimeout("'invoice:42' was not acquired within 5 s"))
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
        """The end of its ``type``, e.g. ``locked``."""
        return str(self.body["type"]).removeprefix(TYPES)

    @property
    def content(self) -> bytes:
        """The body as JSON."""
        return json.dumps(self.body, separators=(",", ":")).encode()


def kind_of(error: LockError) -> Kind:
    """Return the kind of problem that an error is.

    A lock, a mutex or a lease that another holds is *locked* (423), a full semaphore *no-room* (429), a pool without a
    free connection *unavailable* (503). An error that only the service's operator can fix (a semaphore that was never
    created, tables that are not installed) is *failed* (500).

    >>> kind_of(sl.LockTimeout("no room", kind="semaphore")).status
    429
    """
    if isinstance(error, LockTimeout) and error.kind == "semaphore" and not isinstance(error, PoolTimeout):
        return NO_ROOM
    return next((kind for error_class, kind in _KINDS if isinstance(error, error_class)), FAILED)


def problem_of(error: LockError, *, retry_after: float | timedelta | None = None) -> Problem:
    """Return the answer to a request that failed with an error of this library.

    :param retry_after: the ``Retry-After``, in seconds or as a ``timedelta``, rounded up; by default 1 for *locked* and
        5 for *no-room*. It is sent only where repeating the request helps.
    :raises ValueError: for a ``retry_after`` below 0.

    >>> problem = problem_of(sl.LockTimeout("'invoice:42' was not acquired within 5 s"))
    >>> problem.status, problem.headers["Retry-After"]
    (423, '1')
    """
    return problem(kind_of(error), retry_after=retry_after)


def problem(kind: Kind, *, retry_after: float | timedelta | None = None) -> Problem:
    """As :func:`problem_of`, for a known kind.

    >>> closed = Kind("closed", 503, "Closed", "We are closed on Sundays.", retry=3600)
    >>> problem(closed, retry_after=1800).headers["Retry-After"]
    '1800'
    """
    body = {"type": TYPES + kind.code, "title": kind.title, "status": kind.status, "detail": kind.detail}
    # the answer is out of date for the next client
    headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
    if kind.retry is not None:
        headers["Retry-After"] = str(kind.retry if retry_after is None else retry_seconds(retry_after))
    return Problem(kind.status, headers, body)


def retry_seconds(retry_after: float | timedelta) -> int:
    """Return a value for ``Retry-After``: whole seconds, rounded up."""
    return math.ceil(bounded_seconds(retry_after, "retry_after"))


def retry_of(kind: Kind, timeout: float | None) -> int | None:
    """Return the ``Retry-After`` after a wait with a timeout (``None``: no limit): not less than the timeout."""
    if kind not in (LOCKED, NO_ROOM) or kind.retry is None or timeout is None:
        return kind.retry
    return max(kind.retry, min(math.ceil(timeout), LONGEST_RETRY))

"""The actions of an authorized visitor: release, requeue, revive, pause, resume, resize.

Each executes one operation, and is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import escape_unprintable
from sqlalchemy_locks.admin.overview import OwnTable
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue.liveness import STALLED_AFTER
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.values import Grant, Released

#: called with the locks, the form's fields, the visitor's name, and the app's own tables; returns a message
Action = Callable[[Locks, Mapping[str, str], str, Mapping[str, OwnTable]], str]

#: how many jobs one click requeues or revives at most
MAX_JOBS = 1000
#: the log of actions; warnings, which Python writes to standard error where the app has configured no handler
AUDIT = logging.getLogger("sqlalchemy_locks.audit")
_RELEASED = {
    Released.RELEASED: "Released {!r}",
    Released.ALREADY_RELEASED: "{!r} was released before",
    Released.UNKNOWN: "There is no request {!r}",
}


def release(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, OwnTable]) -> str:
    """Release the permits of a request; its holder notices at its next renewal or guarded write."""
    external_id, nonce = form.get("external_id", ""), form.get("request", "")
    if nonce and not (nonce.isascii() and nonce.isalnum() and len(nonce) <= 32):
        raise ValueError(f"a request's token is up to 32 letters and digits, not {nonce[:40]!r}")
    # the request that the page showed: its external id may since have been granted to another caller
    request = Grant(external_id, True, "ACQUIRED", {}, token=nonce) if nonce else external_id
    return _RELEASED[locks.release(request)].format(external_id)


def requeue(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, OwnTable]) -> str:
    """Requeue stalled jobs of a queue."""
    name = form.get("queue", "")
    operation = _queue_of(form, own).requeue_stalled(STALLED_AFTER, queue=name, limit=MAX_JOBS)
    return f"Requeued {_jobs(locks.run(operation) or 0, 'stalled', name)}"


def revive(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, OwnTable]) -> str:
    """Return one dead job, or those of a queue, to the queue with all their attempts."""
    name, job, queue = form.get("queue", ""), form.get("job"), _queue_of(form, own)
    if not job:
        return f"Revived {_jobs(locks.run(queue.revive(queue=name, limit=MAX_JOBS)) or 0, 'dead', name)}"
    return (
        f"Revived the job {job}" if locks.run(queue.revive(external_id=job)) else f"The job {job} is not dead any more"
    )


def _jobs(number: int, state: str, queue: str) -> str:
    more = "; there may be more" if number == MAX_JOBS else ""
    return f"{number:,} {state} job{'' if number == 1 else 's'} of {queue!r}{more}"


def pause(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, OwnTable]) -> str:
    """Pause a queue: no more of its jobs are captured."""
    name = form.get("queue", "")
    return f"{name!r} {'is paused now' if locks.run(_queue_of(form, own).pause(name)) else 'was paused before'}"


def resume(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, OwnTable]) -> str:
    """Resume a paused queue."""
    name = form.get("queue", "")
    return f"{name!r} {'is resumed' if locks.run(_queue_of(form, own).resume(name)) else 'was not paused'}"


def _queue_of(form: Mapping[str, str], own: Mapping[str, OwnTable]) -> Queue[Any]:
    queue = own.get(form["own"]) if form.get("own") else Queue()
    if not isinstance(queue, Queue):
        raise ValueError(f"the app has no queue of its own named {form['own'][:40]!r}")
    return queue


def resize(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, OwnTable]) -> str:
    """Change a semaphore's capacity; the visitor is recorded in its history."""
    name, capacity = form.get("name", ""), form.get("capacity", "")
    if not capacity.isascii() or not capacity.isdigit() or len(capacity) > 10:
        raise ValueError(f"a capacity is a whole number up to {2**31 - 1}, not {capacity[:40]!r}")
    old = locks.run(semaphore.resize(name, int(capacity), by=who))
    return f"{name!r} has a capacity of {int(capacity):,} now; it was {old:,}"


ACTIONS: Mapping[str, Action] = {
    "release": release,
    "requeue": requeue,
    "revive": revive,
    "pause": pause,
    "resume": resume,
    "resize": resize,
}


def subject(form: Mapping[str, str]) -> str:
    """Return what a form is about: the name of a semaphore or a queue, or the external id of a request or a job."""
    return next((form[field] for field in ("name", "job", "queue", "external_id") if field in form), "")


def log_done(name: str, who: str, message: str) -> None:
    """Log an action."""
    AUDIT.warning("page: %s by %r: %s", name, who, message)


def log_refused(name: str, who: str | None, why: str, form: Mapping[str, str]) -> None:
    """Log an action that was refused or failed."""
    fields = {field: value[:300] for field, value in form.items() if field != "token"}
    AUDIT.warning("page: %s by %r refused: %s %r", name, who, escape_unprintable(why), fields)

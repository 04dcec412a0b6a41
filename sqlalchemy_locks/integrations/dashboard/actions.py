"""release, requeue, resize: what an authorized visitor may do, each one operation of the library, and each audited."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from sqlalchemy_locks import semaphore
from sqlalchemy_locks._validation import escape_unprintable
from sqlalchemy_locks.admin.overview import STALLED, Own
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue.queue import Queue
from sqlalchemy_locks.values import Grant, Released

#: of the form's fields, by whom, where it may be about a table of the app's own
Act = Callable[[Locks, Mapping[str, str], str, Mapping[str, Own]], str]

#: jobs that one click gives back
BATCH = 1000
_log = logging.getLogger("sqlalchemy_locks")
_RELEASED = {
    Released.RELEASED: "Released {!r}",
    Released.ALREADY_RELEASED: "{!r} was released before",
    Released.UNKNOWN: "There is no request {!r} any more",
}


def release(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, Own]) -> str:
    """Give back the permits of a request; its holder finds out when it renews, or writes."""
    external_id, nonce = form.get("external_id", ""), form.get("request", "")
    if nonce and not (nonce.isascii() and nonce.isalnum() and len(nonce) <= 32):
        raise ValueError(f"a request's token is up to 32 letters and digits, not {nonce[:40]!r}")
    # the one that was seen: its id may be another's by now, who has reclaimed it
    seen = Grant(external_id, True, "ACQUIRED", {}, token=nonce) if nonce else external_id
    return _RELEASED[locks.release(seen)].format(external_id)


def requeue(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, Own]) -> str:
    """Give back dead jobs of a queue, to be tried as often as new ones; or stalled ones."""
    called, what = form.get("queue", ""), form.get("what", "")
    queue = own.get(form["own"]) if form.get("own") else Queue()
    if not isinstance(queue, Queue):
        raise ValueError(f"no queue of the app's own is called {form['own'][:40]!r} here")
    if what == "dead":
        done = locks.run(queue.revive(queue=called, limit=BATCH)) or 0
    elif what == "stalled":
        done = locks.run(queue.requeue_stalled(STALLED, queue=called, limit=BATCH)) or 0
    else:
        raise ValueError("what is given back is 'dead' or 'stalled'")
    more = "; there may be more" if done == BATCH else ""
    return f"Gave back {done:,} {what} job{'' if done == 1 else 's'} of {called!r}{more}"


def resize(locks: Locks, form: Mapping[str, str], who: str, own: Mapping[str, Own]) -> str:
    """Change a semaphore's capacity; its history has who did."""
    called, given = form.get("name", ""), form.get("capacity", "")
    if not given.isascii() or not given.isdigit() or len(given) > 10:
        raise ValueError(f"a capacity is a whole number, not {given[:40]!r}")
    was = locks.run(semaphore.resize(called, int(given), by=who))
    return f"{called!r} has a capacity of {int(given):,} now; it was {was:,}"


ACTIONS: Mapping[str, Act] = {"release": release, "requeue": requeue, "resize": resize}


def done(name: str, who: str, said: str) -> None:
    """Have it in the log."""
    _log.warning("page: %s by %r: %s", name, who, said)


def refused(name: str, who: str | None, why: str, form: Mapping[str, str]) -> None:
    """The same for what was not done."""
    about = {field: value[:300] for field, value in form.items() if field != "token"}
    _log.warning("page: %s by %r refused: %s %r", name, who, escape_unprintable(why), about)

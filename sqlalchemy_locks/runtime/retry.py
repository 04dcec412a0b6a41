"""Retries: a transaction is run again, as a whole, after an error that has left nothing behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from sqlalchemy_locks.core.engine_state import backend_of
from sqlalchemy_locks.errors import LockLost, MustRollback, OutcomeUnknown
from sqlalchemy_locks.runtime.backoff import Backoff

T = TypeVar("T")

Sleep = Callable[[float], None]
RETRIES = 3


class NotCommitted(LockLost):
    """Nothing of an operation is committed: it may be run again."""


def sleep_for(engine: Engine) -> Sleep:
    """Return what sleeps between retries: the thread, or, under an async driver, the task."""
    if engine.dialect.is_async:
        return lambda seconds: await_only(asyncio.sleep(seconds))
    return time.sleep


def retried(
    attempt: Callable[[], T],
    engine: Engine,
    sleep: Sleep,
    *,
    repeatable: bool = False,
    on_retry: Callable[[BaseException, int], object] = lambda error, count: None,
) -> T:
    """Run ``attempt``, and again, three times at most, after an error that leaves nothing behind.

    A deadlock or a serialization failure has rolled everything back, and so has the death of a connection before COMMIT
    was sent.

    :param repeatable: it may also be run again when it is not known whether it was done.
    :param on_retry: called with each error that is followed by a retry, and the number of that retry.
    """

    def retryable(error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return error.connection_invalidated or backend_of(engine.dialect).transient(error)
        return isinstance(error, (MustRollback, NotCommitted)) or (repeatable and isinstance(error, OutcomeUnknown))

    backoff: Backoff | None = None
    for retry in range(1, RETRIES + 1):
        try:
            return attempt()
        except Exception as error:
            if not retryable(error):
                raise
            on_retry(error, retry)
        backoff = backoff or Backoff(shortest=0.01, share=1)
        # random, so that two that were each other's deadlock don't meet again
        sleep(random.uniform(0, backoff.pause()))
    return attempt()

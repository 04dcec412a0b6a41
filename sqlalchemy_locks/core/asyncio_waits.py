"""Waits that lose no cancellation, and clean-up that completes although its task was cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("sqlalchemy_locks")
T = TypeVar("T")

#: the longest timeout in seconds that is passed to ``threading`` and ``asyncio``, ten years
FOREVER = 86400.0 * 3650
#: seconds that the clean-up has after the first cancellation
GRACE = 5.0


async def wait_for_future(future: asyncio.Future[Any], timeout: float | None) -> bool:
    """Wait for a future without cancelling it; return whether it is done within ``timeout`` seconds.

    Not ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes together with the result.
    """
    await asyncio.wait({future}, timeout=None if timeout is None else min(FOREVER, timeout))
    return future.done()


async def wait_for_event(event: asyncio.Event, timeout: float | None) -> None:
    """Wait until an event is set, for ``timeout`` seconds at most."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await wait_for_future(waiting, timeout)
    finally:
        waiting.cancel()


async def shielded(work: Coroutine[Any, Any, T], *, raise_cancelled: bool = False) -> T:
    """Await clean-up to its end, although its task may be cancelled at every ``await``.

    A cancel scope of anyio, and so of Starlette and FastAPI, cancels a task again and again. The clean-up itself is
    cancelled ``GRACE`` seconds after the first cancellation.

    :param raise_cancelled: when the clean-up is done, raise a cancellation that came during it. Otherwise the caller
        raises the cancellation that it has caught.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    grace: asyncio.TimerHandle | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            grace = grace or asyncio.get_running_loop().call_later(GRACE, task.cancel)
    if grace is not None:
        grace.cancel()
    if cancelled is not None and raise_cancelled:
        if not task.cancelled() and (failure := task.exception()):
            log.error("a clean-up failed: %s", failure, exc_info=failure)
        raise cancelled
    return task.result()

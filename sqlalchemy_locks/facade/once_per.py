"""once_per: the ``Timeout`` of a name, created on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.errors import UnknownTask


def acquire_period(run: Callable[..., Any], timeout: Timeout, name: str, queue: str | None, nonce: str) -> bool:
    """Acquire the current period of a name; return ``False`` when another caller has acquired it.

    :param run: runs an operation under a nonce, as ``Locks`` does.
    """
    operation = timeout.acquire(name, queue=queue)
    try:
        return bool(run(operation, nonce))
    except UnknownTask:
        run(timeout.create(name, queue=queue))
        return bool(run(operation, nonce))

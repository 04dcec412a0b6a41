"""``locks.mutex``: mutexes that survive lost replies; those of the shipped table are created on first use.

Each acquisition stores a nonce in its row. The nonce is remembered here until the release, which then releases this
acquisition and no other, so a release whose reply was lost can be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.core.operation import Operation, fresh_nonce
from sqlalchemy_locks.core.roles import DEFAULT_QUEUE, NONCE_PARAM
from sqlalchemy_locks.errors import OutcomeUnknown, UnknownTask
from sqlalchemy_locks.facade.host import LockHost

#: how many acquisitions are remembered: so many that are held, and so many that were released
_MAX_REMEMBERED = 10_000


class Mutexes:
    """The type of :attr:`Locks.mutex` and the result of :meth:`Locks.mutexes`.

    >>> if locks.mutex.acquire("task_a"):
    ...     locks.mutex.release("task_a")
    """

    def __init__(self, locks: LockHost, mutex: Mutex | None = None) -> None:
        self._locks, self._run = locks, locks._run
        #: rows of the shipped table have no columns that only the app could fill
        self._creates = mutex is None
        self._mutex = mutex or Mutex()
        self._mutex._mapping.require("token", "to recognize its own acquisition")
        self._stores_owner = self._mutex._mapping.has("owner")
        #: nonces by queue and id: of acquisitions made here, and of those released here since. A mutex has several
        #: nonces if the outcome of an acquisition is unknown: at most one of them is the current one.
        self._acquired: dict[tuple[Any, Any], tuple[str, ...]] = {}
        self._released: dict[tuple[Any, Any], tuple[str, ...]] = {}
        self._changing = threading.Lock()

    def acquire(self, id: Any, *, queue: Any = None, owner: str | None = None) -> bool:
        """Acquire a mutex if it is free and has a retry left; see :meth:`Mutex.acquire`.

        :param owner: stored in the row; ``Locks(owner=...)`` if not given.
        :return: ``True`` if it was acquired; it is held until any process releases it.
        :raises OutcomeUnknown: if the connection died, and so did those of three more attempts.

        >>> locks.mutex.acquire("task_a"), locks.mutex.acquire("task_a")
        (True, False)
        """
        return bool(self._acquire(self._mutex.acquire, id, queue, owner))

    def acquire_token(self, id: Any, *, queue: Any = None, owner: str | None = None) -> int | None:
        """Acquire a mutex as :meth:`acquire` does, and return a fencing token, or ``None`` if it was not acquired.

        >>> locks.mutex.acquire_token("document:1")
        1
        """
        token: int | None = self._acquire(self._mutex.acquire_token, id, queue, owner)
        return token

    def release(self, id: Any, *, queue: Any = None, owner: str | None = None) -> bool:
        """Release a mutex.

        An acquisition made here is released only if it is still the current one: a second release, or one after another
        process has acquired the mutex, returns ``False`` and changes nothing. (After 10,000 acquisitions or releases of
        other ids, an acquisition is forgotten, and released as if another process had made it.) If a release of another
        process's acquisition gets no reply, ``OutcomeUnknown`` is raised: a second attempt could release the mutex of
        the next holder.

        :param owner: release it only if this owner acquired it.
        :return: ``True`` if this call released it.

        >>> locks.mutex.acquire("task_a"), locks.mutex.release("task_a"), locks.mutex.release("task_a")
        (True, True, False)
        """
        key = queue or DEFAULT_QUEUE, id
        nonces = self._acquired.get(key) or self._released.get(key)
        if owner is not None or nonces is None:
            released = bool(self._run(self._mutex.release(id, queue=queue, owner=owner)))
        else:
            released = False
            mapping, release = self._mutex._mapping, self._mutex._impls.release_of_nonce
            values = mapping.identity(id, queue)
            for nonce in reversed(nonces):
                if self._run(Operation(release, {**values, NONCE_PARAM: mapping.nonce_type(nonce)}), nonce):
                    released = True
                    break
            with self._changing:
                # unless another thread has acquired it since
                if self._acquired.get(key) is nonces:
                    del self._acquired[key]
                    _remember(self._released, key, nonces)
        if released and (self._locks.dispatch.released or self._locks._is_logged()):
            self._locks._emit("released", "mutex", (id,), owner=owner)
        return released

    def _acquire(self, acquire: Callable[..., Operation[Any]], id: Any, queue: Any, owner: str | None) -> Any:
        if owner is None and self._stores_owner:
            owner = self._locks.owner
        operation = acquire(id, queue=queue, owner=owner)
        nonce, key = fresh_nonce(), (queue or DEFAULT_QUEUE, id)
        try:
            try:
                answer = self._run(operation, nonce)
            except UnknownTask:
                if not self._creates:
                    raise
                self._run(self._mutex.create(id, queue=queue))
                answer = self._run(operation, nonce)
        except BaseException as error:
            if isinstance(error, OutcomeUnknown) or not isinstance(error, Exception):
                # it may have been acquired: a release then releases this acquisition, the one before, or nothing
                with self._changing:
                    _remember(self._acquired, key, (*self._acquired.get(key, ()), nonce))
            raise
        if answer:
            with self._changing:
                self._released.pop(key, None)
                _remember(self._acquired, key, (nonce,))
            if self._locks.dispatch.acquired or self._locks._is_logged():
                self._locks._emit("acquired", "mutex", (id,), owner=owner, fence=None if answer is True else answer)
        return answer


def _remember(acquired: dict[tuple[Any, Any], tuple[str, ...]], key: tuple[Any, Any], nonces: tuple[str, ...]) -> None:
    acquired.pop(key, None)  # to the end: the first one is forgotten
    acquired[key] = nonces
    if len(acquired) > _MAX_REMEMBERED:
        del acquired[next(iter(acquired))]

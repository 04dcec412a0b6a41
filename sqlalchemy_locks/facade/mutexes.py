"""``locks.mutex``: mutexes that are safe when an answer is lost; those of the shipped table are made on first use.

Each acquisition leaves a nonce in the row. It is remembered here until the release, which then frees this
acquisition and no other: a release whose answer was lost can be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy_locks.conditional.mutex import Mutex
from sqlalchemy_locks.core.operation import Operation, fresh_nonce
from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.errors import OutcomeUnknown, UnknownTask

_REMEMBERED = 10_000


def _nobody(*told: object, **more: object) -> None:
    pass


class Mutexes:
    """What :attr:`Locks.mutex` is, and what :meth:`Locks.mutexes` gives.

    >>> if locks.mutex.acquire("task_a"):
    ...     locks.mutex.release("task_a")
    """

    def __init__(
        self,
        run: Callable[[Operation[Any], str], Any],
        owner: Callable[[], str],
        mutex: Mutex | None = None,
        told: Callable[..., object] = _nobody,
    ) -> None:
        self._run, self._owner, self._told = run, owner, told
        #: the shipped table's rows have nothing in them that only the app could know
        self._makes = mutex is None
        self._mutex = mutex or Mutex()
        self._rows = self._mutex._rows
        self._rows.require("token", "to know one's own acquisition again")
        #: of what was acquired here, and then of what was released here, as far as that is remembered
        self._nonces: dict[tuple[Any, Any], str] = {}
        self._released: dict[tuple[Any, Any], str] = {}

    def acquire(self, id: Any, *, queue: Any = None, owner: str | None = None) -> bool:
        """Take a mutex, if it is free and has a retry left; see :meth:`Mutex.acquire`.

        :param owner: stored in the row; ``Locks(owner=...)`` when not given.
        :return: ``True`` when it is yours, until it is released, by whatever process.
        :raises OutcomeUnknown: when the connection died, and so did those of three more tries.

        >>> locks.mutex.acquire("task_a"), locks.mutex.acquire("task_a")
        (True, False)
        """
        return bool(self._acquire(self._mutex.acquire, id, queue, owner))

    def acquire_token(self, id: Any, *, queue: Any = None, owner: str | None = None) -> int | None:
        """As :meth:`acquire`, for a fencing token, or ``None``.

        >>> locks.mutex.acquire_token("document:1")
        1
        """
        token: int | None = self._acquire(self._mutex.acquire_token, id, queue, owner)
        return token

    def release(self, id: Any, *, queue: Any = None, owner: str | None = None) -> bool:
        """Give a mutex back.

        One that was acquired here is given back only if that very acquisition still has it: a second release, or one
        that comes after somebody else's, answers ``False`` and frees nobody. For one that another process acquired, a
        lost answer raises ``OutcomeUnknown``, since a second try could free the next holder.

        :param owner: give it back only if it was acquired by this owner.
        :return: ``True`` when it is free now because of this.

        >>> locks.mutex.acquire("task_a"), locks.mutex.release("task_a"), locks.mutex.release("task_a")
        (True, True, False)
        """
        key = queue or DEFAULT_QUEUE, id
        mine = self._nonces.get(key) or self._released.get(key)
        if owner is not None or mine is None:
            freed = bool(self._run(self._mutex.release(id, queue=queue, owner=owner), fresh_nonce()))
            if freed:
                self._told("released", "mutex", (id,), owner=owner)
            return freed
        released = bool(self._run(self._mutex._release_own(id, queue, mine), mine))
        if self._nonces.get(key) == mine:
            del self._nonces[key]
            self._released[key] = mine
            if len(self._released) > _REMEMBERED:
                del self._released[next(iter(self._released))]
        if released:
            self._told("released", "mutex", (id,))
        return released

    def _acquire(self, acquire: Callable[..., Operation[Any]], id: Any, queue: Any, owner: str | None) -> Any:
        if owner is None and self._rows.has("owner"):
            owner = self._owner()
        operation = acquire(id, queue=queue, owner=owner)
        nonce, key = fresh_nonce(), (queue or DEFAULT_QUEUE, id)
        got = None
        try:
            try:
                got = self._run(operation, nonce)
            except UnknownTask:
                if not self._makes:
                    raise
                self._run(self._mutex.create(id, queue=queue), fresh_nonce())
                got = self._run(operation, nonce)
        except BaseException as error:
            if isinstance(error, OutcomeUnknown) or not isinstance(error, Exception):
                # perhaps it is ours, and nobody knows: a release then frees this acquisition, or nobody's
                self._nonces.setdefault(key, nonce)
            raise
        if got:
            self._released.pop(key, None)
            self._nonces[key] = nonce
            self._told("acquired", "mutex", (id,), owner=owner, fence=None if got is True else got)
        return got

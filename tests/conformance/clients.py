"""Clients: the ways to run an operation, behind one face, so that one test tries them all.

A client is one party of a race. Its calls block the caller; ``later()`` makes one in a thread of the client's
own, so that a test can watch it wait. The asynchronous ones live in an event loop of their own.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conformance.faces import Blocking, Loop

T = TypeVar("T")


class Place:
    """An engine, with an event loop where it is asynchronous: what a process of an app has."""

    def __init__(self, url: str, asynchronous: bool, options: dict[str, Any]) -> None:
        self.loop: Any = Loop() if asynchronous else None
        self.engine: Any = (create_async_engine if asynchronous else create_engine)(url, **options)

    def close(self) -> None:
        if self.loop is None:
            self.engine.dispose()
        else:
            self.loop.result(self.engine.dispose())
            self.loop.close()


class Places:
    """The places of the tests of a module: no two clients are in one at the same time."""

    def __init__(self) -> None:
        self._made: list[Place] = []
        self._free: defaultdict[str, list[Place]] = defaultdict(list)

    def enter(self, url: str, asynchronous: bool, options: dict[str, Any]) -> tuple[Place, Callable[[], None]]:
        """Return a place, and what leaves it."""
        free = self._free[f"{url} {asynchronous} {options}"]
        if not free:
            free.append(Place(url, asynchronous, options))
            self._made.append(free[-1])
        place = free.pop()
        return place, lambda: free.append(place)

    def close(self) -> None:
        for place in self._made:
            place.close()


class Client:
    """One party: at most one transaction at a time, in which it holds what it has taken."""

    asynchronous = False
    #: each operation is a transaction of its own
    transient = False
    #: whether several keys can be held in one transaction, one after another
    accumulates = True

    def __init__(self, places: Places, url: str, options: dict[str, Any]) -> None:
        self._executor = ThreadPoolExecutor(1, initializer=self._mine)
        self._thread_id = 0
        self._calls: list[Future[Any]] = []
        self.place, self._leave = places.enter(url, self.asynchronous, options)
        self.setup()

    def _mine(self) -> None:
        self._thread_id = threading.get_ident()

    def setup(self) -> None:
        raise NotImplementedError

    def later(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        future = self._executor.submit(call, *arguments, **named)
        self._calls.append(future)
        return future

    @property
    def busy(self) -> bool:
        """Whether a call is still under way."""
        return not all(call.done() for call in self._calls)

    def hold(self, key: Any, *, shared: bool = False, wait: float | None = None) -> None:
        raise NotImplementedError

    def try_hold(self, key: Any, *, shared: bool = False) -> bool:
        raise NotImplementedError

    def scalar(self, operation: Any) -> Any:
        """Run any operation in the client's transaction."""
        raise NotImplementedError

    def end(self, *, rollback: bool = False) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._executor.shutdown()
        self.disconnect()
        self._leave()

    def disconnect(self) -> None:
        """Return its connection."""


class _Executing(Client):
    """What runs operations itself, in a transaction of its own making."""

    def hold(self, key: Any, *, shared: bool = False, wait: float | None = None) -> None:
        operation = (sl.lock.shared if shared else sl.lock.exclusive)(key)
        if wait is not None:
            operation = operation.execution_options(locks_wait=wait)
        assert self.scalar(operation) is None

    def try_hold(self, key: Any, *, shared: bool = False) -> bool:
        got = self.scalar((sl.lock.try_shared if shared else sl.lock.try_exclusive)(key))
        assert isinstance(got, bool)
        return got


class ViaSession(_Executing):
    def setup(self) -> None:
        self.session: Any = Session(self.place.engine)

    def scalar(self, operation: Any) -> Any:
        return self.session.scalar(operation)

    def end(self, *, rollback: bool = False) -> None:
        self.session.rollback() if rollback else self.session.commit()

    def disconnect(self) -> None:
        self.session.close()


class ViaConnection(_Executing):
    def setup(self) -> None:
        engine: Engine = self.place.engine
        self.connection = engine.connect()

    def scalar(self, operation: Any) -> Any:
        return self.connection.execute(operation).scalar()

    def end(self, *, rollback: bool = False) -> None:
        self.connection.rollback() if rollback else self.connection.commit()

    def disconnect(self) -> None:
        self.connection.close()


class ViaLocks(Client):
    accumulates = False
    transient = True
    block: Any = None
    held: Any = None

    def setup(self) -> None:
        self.locks: Any = sl.Locks(self.place.engine)

    def _enter(self, key: Any, shared: bool, timeout: float | None) -> None:
        # in the client's own thread, since a thread can't hold what it holds already
        def enter() -> None:
            block = (self.locks.shared if shared else self.locks.exclusive)(key, timeout=timeout)
            self.held = block.__enter__()
            self.block = block

        if threading.get_ident() == self._thread_id:
            enter()
        else:
            self._executor.submit(enter).result()

    def hold(self, key: Any, *, shared: bool = False, wait: float | None = None) -> None:
        self._enter(key, shared, wait)

    def try_hold(self, key: Any, *, shared: bool = False) -> bool:
        try:
            self._enter(key, shared, 0)
        except sl.LockTimeout:
            return False
        return True

    def scalar(self, operation: Any) -> Any:
        if self.held is not None:
            return self.held.session.scalar(operation)
        return self.locks.run(operation)

    def end(self, *, rollback: bool = False) -> None:
        block, self.block, self.held = self.block, None, None
        if block is None:
            return
        error = RuntimeError("rolled back by the test") if rollback else None
        self._executor.submit(block.__exit__, type(error) if error else None, error, None).result()

    def close(self) -> None:
        self.end(rollback=True)
        super().close()


class ViaAsyncSession(ViaSession):
    asynchronous = True

    def setup(self) -> None:
        self.session: Any = Blocking(AsyncSession(self.place.engine), self.place.loop)


class ViaAsyncLocks(ViaLocks):
    asynchronous = True

    def setup(self) -> None:
        self.locks: Any = Blocking(sl.AsyncLocks(self.place.engine), self.place.loop)


SYNC: dict[str, type[Client]] = {"Session": ViaSession, "Connection": ViaConnection, "Locks": ViaLocks}
ASYNC: dict[str, type[Client]] = {"AsyncSession": ViaAsyncSession, "AsyncLocks": ViaAsyncLocks}

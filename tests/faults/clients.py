"""What a client does in an episode, and how it is recorded; each in a thread, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, create_engine, event, text, update
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as CheckoutTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from tests.conformance.faces import Blocking, Loop
from tests.faults.history import Answer, Holding, Recorder
from tests.faults.proxy import encryption
from tests.faults.space import CLUSTERS, Config, Episode, Step
from tests.faults.tables import Document, Task

#: errors of a driver and of SQLAlchemy, which a session of one's own raises as they are
RAW = (DBAPIError, InvalidRequestError, CheckoutTimeout, OSError, asyncio.TimeoutError)
DRIVERS = ("asyncpg", "psycopg", "psycopg2", "pymysql", "aiomysql", "asyncmy", "sqlite3")
#: the capacities of the rooms
ROOMS = {0: 2, 1: 1, 2: 3}
#: the queue of those that capture, and the workers'
QUEUES = ("queue0", "queue1")
#: a worker's heartbeat, in seconds
HEARTBEAT = 0.3


class GivenUp(Exception):
    """A workload ends its block on purpose, or because a statement of its own has failed."""

    __module__ = "tests.faults.clients"  # in a process of its own, too


class Face:
    """``Locks`` or ``AsyncLocks`` on an engine as a config asks for, and sessions on the same engine; all blocking."""

    def __init__(self, config: Config, url: str) -> None:
        self.isolation = config.isolation if config.isolation_by == "option" else None
        self.stalled = config.stalled
        options: dict[str, Any] = {}
        if config.engine != "sqlite" or config.driver == "pysqlite":
            options |= {"pool_size": config.pool, "max_overflow": 0, "pool_timeout": 30}
        if config.engine != "sqlite":
            options["connect_args"] = encryption(config.driver, tls=config.tls)
        if config.isolation and config.isolation_by == "option":
            options["isolation_level"] = config.isolation
        self.loop: Loop | None = None
        if config.face == "Locks":
            self.engine: Engine = create_engine(url, **options)
        else:
            self.loop = Loop()
            self._async: AsyncEngine = create_async_engine(url, **options)
            self.engine = self._async.sync_engine
        if config.isolation and config.isolation_by == "event" and config.isolation != "AUTOCOMMIT":
            event.listen(self.engine, "connect", functools.partial(_set_level, config))

    def locks(self) -> Any:
        """Locks of one client, as a process of its own would have."""
        return sl.Locks(self.engine) if self.loop is None else Blocking(sl.AsyncLocks(self._async), self.loop)

    def within(self, session: Any, call: Callable[[Session], Any]) -> Any:
        """Call a function of a synchronous session with the session of a block."""
        return call(session) if self.loop is None else session.run_sync(call)

    def transact(self, call: Callable[[Session], Any]) -> Any:
        """Call a function of a session of its own."""
        try:
            return self._transact(call)
        except Exception as error:
            # SQLAlchemy's session keeps a connection whose ROLLBACK has failed, as that of a node of a cluster may: it
            # is returned when it is collected
            if any(frame.name == "_rollback_impl" for frame in traceback.extract_tb(error.__traceback__)):
                chained: BaseException | None = error
                while chained is not None:
                    traceback.clear_frames(chained.__traceback__)
                    chained = chained.__context__
                gc.collect()
            raise

    def _transact(self, call: Callable[[Session], Any]) -> Any:
        if self.loop is None:
            with Session(self.engine) as session:
                return call(session)

        async def run() -> Any:
            async with AsyncSession(self._async) as session:
                return await session.run_sync(call)

        return self.loop.result(run())

    def worker(self, handle: Callable[[Any, Any], None], **options: Any) -> Any:
        """A worker whose ``run`` blocks, with a handler of the job and the worker."""
        if self.loop is None:
            worker: Any = sl.Worker(sl.Queue(), lambda job: handle(job, worker), bind=self.engine, **options)
            return worker

        async def awaited(job: Any) -> None:
            await asyncio.sleep(0)
            handle(job, asynchronous)

        asynchronous: Any = sl.AsyncWorker(sl.Queue(), awaited, bind=self._async, **options)
        return Blocking(asynchronous, self.loop)

    def empty(self) -> None:
        """Close the connections of the pool; the engine keeps what it has compiled."""
        if self.loop is None:
            self.engine.dispose()
        else:
            self.loop.result(self._async.dispose())

    def close(self) -> None:
        try:
            self.empty()
        finally:
            if self.loop is not None:
                self.loop.close()


def _set_level(config: Config, connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    innodb = config.engine in ("mysql", "mariadb", *CLUSTERS)
    scope = "SESSION" if innodb else "SESSION CHARACTERISTICS AS"
    cursor.execute(f"SET {scope} TRANSACTION ISOLATION LEVEL {config.isolation}")
    cursor.close()
    connection.commit()


class Client:
    """One party of an episode."""

    def __init__(self, name: str, prefix: str, face: Face, recorder: Recorder) -> None:
        self.name, self.prefix, self.face, self.recorder = name, prefix, face, recorder
        self.locks = face.locks()
        #: without transactions, so that a rollback does nothing
        self.autocommit = face.isolation == "AUTOCOMMIT"
        self.jobs, self.tasks = sl.Queue(), sl.StateTransition(ready=("done", "failed"))
        self.mapped = sl.StateTransition(
            Task, id=Task.id, status=Task.status, queue=Task.queue, claim=Task.claim, ready="ready", captured="captured"
        )
        self.stalled = face.stalled
        #: an error aborts the whole transaction
        self.aborts = backend_for(face.engine.dialect).schemas

    def run(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            try:
                getattr(self, f"_{step['what']}")(step)
            except (GivenUp, sl.LockError, *RAW):
                pass  # it is recorded with its call, and judged afterwards
            except Exception as error:
                # SQLAlchemy doesn't wrap what a driver raises when it sets an isolation level
                if type(error).__module__.partition(".")[0] not in DRIVERS:
                    raise

    def named(self, what: str, number: int) -> str:
        return f"{self.prefix}{what}{number}"

    # locks

    def _block(self, step: Step) -> None:
        keys = [self.named("key", key) for key in step["keys"]]
        shared, timeout = step["shared"], step["timeout"]
        block = (self.locks.shared if shared else self.locks.exclusive)(*keys, timeout=timeout)
        with self.recorder.call(self.name, "block", *keys, acquires=True, **{"try": timeout == 0}) as entered:
            held = block.__enter__()
        holds = [self.recorder.hold(self.name, key, shared=shared, call=entered.call) for key in keys]
        writes = 0 if shared else writes_of(step)
        with self.recorder.call(self.name, "work", *keys, ends=entered.call, writes=writes) as answer:
            with self._rolled_back_unless_unknown(answer):
                error: BaseException | None = None
                try:
                    for each in step["body"]:
                        if each == "sample":
                            for hold in holds:
                                hold.sample(lambda: held.lost)
                        elif each == "check":
                            with contextlib.suppress(sl.LockLost, sl.Unsupported):
                                held.check()
                        else:
                            with self._own_errors():
                                act = functools.partial(self._act, what=each, keys=keys, shared=shared, answer=answer)
                                self.face.within(held.session, act)
                    if step["end"] == "rollback":
                        raise GivenUp
                except BaseException as raised:
                    error = raised
                left = time.monotonic_ns()
                block.__exit__(type(error) if error else None, error, None)
                if error is not None:
                    raise error
                answer.value = "committed"
                for hold in holds:
                    hold.leave(left)

    def _session(self, step: Step) -> None:
        keys = [self.named("key", key) for key in step["keys"]]
        shared, timeout = step["shared"], step["timeout"]
        lock: Any = sl.lock

        def act(session: Session) -> None:
            details: dict[str, Any] = {"try": timeout == 0, "own": True}
            holds: list[Holding] = []
            granted: list[str] = []
            with self.recorder.call(self.name, "session", *keys, acquires=True, **details) as entered:
                if step["isolation"]:
                    session.connection(execution_options={"isolation_level": step["isolation"]})
                with session.begin_nested() if step["savepoint"] else contextlib.nullcontext():
                    for key in keys:
                        if timeout == 0:
                            got = session.scalar((lock.try_shared if shared else lock.try_exclusive)(key))
                        else:
                            waits = (lock.shared if shared else lock.exclusive)(key)
                            session.execute(waits.execution_options(locks_wait=timeout))
                            got = True
                        if not got:
                            break
                        granted.append(key)
                entered.value = len(granted) == len(keys)
            holds += [self.recorder.hold(self.name, key, shared=shared, call=entered.call) for key in granted]
            complete = len(granted) == len(keys)
            writes = writes_of(step) if complete and not shared else 0
            ends = {"ends": entered.call, "writes": writes, "own": True}
            with self.recorder.call(self.name, "work", *keys, **ends) as answer:
                committing = False
                try:
                    for each in step["body"] if complete else ():
                        if each not in ("sample", "check"):
                            self._act(session, each, keys, shared, answer)
                    if step["unlock"]:
                        session.execute(sl.lock.unlock(keys[0]))
                    if step["end"] == "rollback":
                        session.rollback()
                        answer.value = "rolled back"
                        return
                    left, committing = time.monotonic_ns(), True
                    session.commit()
                except (*RAW, sl.LockError):
                    if not committing:
                        answer.value = "rolled back"
                    raise
                if "error" in step["body"] and complete and self.aborts:
                    answer.value = "rolled back"  # which is what COMMIT did
                    return
                answer.value = "committed"
                for hold in holds:
                    hold.leave(left)

        try:
            self.face.transact(act)
        except Exception as error:
            # SQLAlchemy doesn't return a connection to the pool that dies as it resets the isolation level. Without
            # this, a pool of one connection is empty from then on.
            if any(frame.name == "_reset_characteristics" for frame in traceback.extract_tb(error.__traceback__)):
                pool: Any = self.face.engine.pool
                pool._dec_overflow()
            raise

    def _act(self, session: Session, what: str, keys: list[str], shared: bool, answer: Answer) -> None:
        """One act of work under a lock."""
        if what == "pause":
            time.sleep(0.002)
        elif what == "write" and not shared:
            for key in keys:
                write(session, key, answer.call)
        elif what in ("nested", "nested_back"):
            nested = session.begin_nested()
            if not shared:
                write(session, keys[0], answer.call)
            nested.rollback() if what == "nested_back" else nested.commit()
        elif what in ("error", "error_nested"):
            nested = session.begin_nested() if what == "error_nested" else None
            try:
                session.execute(text("SELECT * FROM no_such_table_anywhere"))
            except DBAPIError:
                if nested is not None:
                    nested.rollback()

    def _cancelled(self, step: Step) -> None:
        """A task that is cancelled, wherever it is."""
        locks, loop = self.locks._target, self.face.loop
        assert loop is not None
        key = self.named(step["of"], step["key"])

        async def acquire() -> None:
            if step["of"] == "block":
                async with locks.exclusive(key, timeout=5) as held:
                    with self._own_errors():
                        await held.session.execute(text("SELECT 1"))
            elif step["of"] == "lease":
                async with locks.lease(key, ttl=60, timeout=5):
                    await asyncio.sleep(0)
            elif await locks.mutex.acquire(key, owner=self.name):
                await locks.mutex.release(key, owner=self.name)

        async def cancel() -> str:
            task = asyncio.ensure_future(acquire())
            for _ in range(step["ticks"]):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                if step["of"] == "mutex":
                    await locks.mutex.release(key, owner=self.name)
                return "cancelled"
            return "done"

        with self.recorder.call(self.name, "cancelled", key, acquires=True, passes=True) as answer:
            answer.value = loop.result(cancel())

    # conditional updates

    def _mutex(self, step: Step) -> None:
        key, mutex = self.named("mutex", step["key"]), self.locks.mutex
        if step["in_session"]:
            self._mutex_in_session(step, key)
            return
        fence = None
        with self.recorder.call(self.name, "acquire", key, acquires=True) as answer:
            try:
                if step["token"]:
                    fence = mutex.acquire_token(key)
                    answer.value = fence is not None
                else:
                    answer.value = mutex.acquire(key)
            except sl.OutcomeUnknown:
                # as the docs say: releases what that call acquired, if it did
                with self.recorder.call(self.name, "release", key, ends=answer.call):
                    mutex.release(key)
                raise
        if not answer.value:
            return
        hold = self.recorder.hold(self.name, key, fence=fence, lasting=True, call=answer.call)
        if fence is None:
            time.sleep(0.001)
        else:
            self._fenced(key, fence)
        hold.leave()
        with self.recorder.call(self.name, "release", key, ends=answer.call) as released:
            released.value = mutex.release(key)
        if fence is not None and step["late"]:
            self._fenced(key, fence)

    def _fenced(self, key: str, fence: int) -> None:
        with contextlib.suppress(sl.StaleToken), self.recorder.call(self.name, "fenced", key, fence=fence) as answer:
            write = update(Document).where(Document.name == key).values(body=answer.call)
            answer.value = self.locks.run(sl.fenced(write, Document.fence, fence))

    def _mutex_in_session(self, step: Step, key: str) -> None:
        mutex = sl.Mutex()

        def act(session: Session) -> None:
            with self.recorder.call(self.name, "acquire", key, acquires=True, own=True) as answer:
                got = session.scalar(mutex.acquire(key, owner=self.name, nowait=step["token"]))
                if got and (step["end"] == "commit" or self.autocommit):
                    session.commit()
                    answer.value = True
                else:
                    session.rollback()
            if not answer.value:
                return
            hold = self.recorder.hold(self.name, key, lasting=True, call=answer.call)
            hold.leave()
            # again until it is known, since this client is the only one that may
            for _ in range(50):
                with contextlib.suppress(sl.LockError, *RAW):
                    with self.recorder.call(self.name, "release", key, ends=answer.call, own=True) as released:
                        released.value = session.scalar(mutex.release(key, owner=self.name))
                        session.commit()
                    return
                session.rollback()

        self.face.transact(act)

    def _period(self, step: Step) -> None:
        key = self.named("period", step["key"])
        with self.recorder.call(self.name, "once_per", key) as answer:
            answer.value = self.locks.once_per(key, every=86400 * 365)

    # permits

    def _permits(self, step: Step) -> None:
        room = self.named("room", step["key"])
        permits = {room: min(step["count"], ROOMS[step["key"]])}
        if step["both"]:
            permits[self.named("room", (step["key"] + 1) % 3)] = 1
        known = (
            None if step["request"] is None else self.named("request", step["request"]) + f" {sorted(permits.items())}"
        )
        details: dict[str, Any] = {"acquires": True, "try": step["timeout"] == 0}
        if known is not None:
            details["external_id"] = known
        if step["in_session"]:
            details["own"] = True
        with self.recorder.call(self.name, "acquire", *permits, **details) as answer:
            if step["in_session"]:
                operation = sl.semaphore.acquire(permits, external_id=known, ttl=3600)

                def act(session: Session) -> Any:
                    granted = session.scalar(operation)
                    session.commit()
                    return granted

                grant = self.face.transact(act)
                answer.value = grant.token if grant and known is not None else bool(grant)
                if not grant:
                    answer.value = None if known is not None else False
                    return
            else:
                grant = self.locks.acquire(permits, external_id=known, ttl=3600, timeout=step["timeout"])
                answer.value = grant.token if known is not None else True
        holds = []
        if not grant.replayed:
            for name, count in permits.items():
                fence = grant.fence[name]
                # an id that is shared may be released by another client
                lasting = known is None
                hold = self.recorder.hold(
                    self.name, name, shared=True, permits=count, fence=fence, lasting=lasting, call=answer.call
                )
                holds.append(hold)
        under = answer.call if known is None else known
        if step["guarded"]:
            self._guarded(room, grant, under)
        else:
            time.sleep(0.001)
        for hold in holds if known is None else ():
            hold.leave()
        external = {} if known is None else {"external_id": known}
        with self.recorder.call(self.name, "release", *permits, ends=answer.call, **external) as released:
            released.value = self.locks.release(grant if known is None else known).value
        if step["guarded"] and step["late"]:
            self._guarded(room, grant, under)

    def _guarded(self, room: str, grant: Any, under: str) -> None:
        with contextlib.suppress(sl.LockLost), self.recorder.call(self.name, "guarded", room, under=under) as answer:
            write = update(Document).where(Document.name == room).values(body=answer.call)
            answer.value = self.locks.run(sl.guarded(write, grant))

    def _lease(self, step: Step) -> None:
        key = self.named("lease", step["key"])
        block = self.locks.lease(key, ttl=step["ttl"], timeout=step["timeout"])
        details = {"acquires": True, "try": step["timeout"] == 0}
        with self.recorder.call(self.name, "lease", key, **details) as entered:
            grant = block.__enter__()
        hold = self.recorder.hold(self.name, key, fence=grant.fence[key], call=entered.call)
        for _ in range(step["samples"]):
            hold.sample(lambda: lost(grant))
            time.sleep(0.002)
        hold.sample(lambda: lost(grant))
        with self.recorder.call(self.name, "leave", key, ends=entered.call):
            block.__exit__(None, None, None)

    # jobs and tasks

    def _put(self, step: Step) -> None:
        ids = [uuid4() for _ in range(step["count"])]
        queue = self.named("queue", step["queue"])
        put = self.jobs.put(*(step["payload"] for _ in ids), queue=queue, external_id=ids, max_attempts=1000)
        names = [str(each) for each in ids]

        def act(session: Session) -> None:
            with self.recorder.call(self.name, "put", *names, own=True) as answer:
                session.execute(put)
                if step["end"] == "rollback":
                    session.rollback()
                    answer.value = None if self.autocommit else "rolled back"
                else:
                    session.commit()
                    answer.value = "committed"

        self.face.transact(act)

    def _captured(self, step: Step, capturing: Any, name: Callable[[Any], str], session: Session) -> list[Any]:
        with self.recorder.call(self.name, "capture", limit=step["count"], own=True) as answer:
            rows = session.execute(capturing).all()
            if step["end"] == "rollback" and not self.autocommit:
                session.rollback()
                return []
            session.commit()
            answer.value = [name(row) for row in rows]
        return list(rows)

    def _work(self, step: Step) -> None:
        capturing = self.jobs.capture(step["count"], queue=self.named("queue", 0), host=self.name)
        captured = self.face.transact(
            functools.partial(self._captured, step, capturing, lambda job: str(job.external_id))
        )
        for job in captured:
            name = str(job.external_id)
            self.recorder.hold(self.name, f"job {name}", kind="job", lasting=True).leave()
            ends = {"complete": self.jobs.complete, "release": self.jobs.release, "fail": self._failing}
            with self.recorder.call(self.name, step["then"], name) as answer:
                answer.value = self.locks.run(ends[step["then"]](job))

    def _failing(self, job: Any) -> Any:
        return self.jobs.fail(job, error="on purpose", retry_in=0)

    def _task(self, step: Step) -> None:
        capturing = self.tasks.capture(step["count"], queue=self.named("tasks", 0))
        for task in self.face.transact(functools.partial(self._captured, step, capturing, lambda task: task.id)):
            self.recorder.hold(self.name, f"task {self.prefix}{task.id}", kind="row", lasting=True).leave()
            with self.recorder.call(self.name, "set_status", task.id) as answer:
                answer.value = self.locks.run(self.tasks.set_status(task, "done"))

    def _mapped(self, step: Step) -> None:
        """Capture entities: by a transition of their status, or by a condition."""
        queue, by_transition = self.named("mapped", step["queue"]), step["queue"] == 0
        where = (Task.queue == queue, Task.status == "ready")
        capturing = (
            self.mapped.capture(step["count"], queue=queue)
            if by_transition
            else sl.capture(Task, where=where, values={"status": "captured"}, limit=step["count"])
        )

        def act(session: Session) -> None:
            with self.recorder.call(self.name, "capture", limit=step["count"], own=True) as answer:
                found: Any = session.scalars(capturing).all()
                assert all(task.status == "captured" for task in found), found
                ids = [task.id for task in found]
                if step["end"] == "rollback" and not self.autocommit:
                    session.rollback()
                    return
                session.commit()
                answer.value = ids
            holds = [self.recorder.hold(self.name, f"task {id}", kind="row", lasting=True) for id in ids]
            for hold, id, task in zip(holds, ids, found, strict=True):
                hold.leave()
                with self.recorder.call(self.name, "set_status", id, own=True):
                    if by_transition:
                        session.execute(self.mapped.set_status(task, "ready"))
                    else:
                        session.execute(update(Task).where(Task.id == id).values(status="ready"))
                    session.commit()

        self.face.transact(act)

    def _worker(self, step: Step) -> None:
        """Work until the queue is empty, or a handler stops the worker."""
        begun = itertools.count(1)
        # nobody else may run a job again while its worker lives, whatever happens to connections
        once = self.stalled >= 60

        def handle(job: Any, worker: Any) -> None:
            name, first = str(job.external_id), job.attempts == 1
            hold = self.recorder.hold(self.name, f"job {name}", kind="job")
            with self.recorder.call(self.name, "handle", name, once=once, own=True) as answer:
                if next(begun) == step["stop_after"]:
                    worker.stop()
                if job.payload == "pause" and self.face.loop is None:
                    time.sleep(0.01)
                if job.payload == "raise" and first:
                    raise GivenUp("on purpose")
                if job.payload == "retry" and first:
                    raise sl.Retry
                if job.payload == "discard":
                    raise sl.Discard("on purpose")
                answer.value = "lost" if hold.sample(lambda: job.lost) else "done"

        worker = self.face.worker(
            handle,
            name=self.named("queue", 1),
            concurrency=step["concurrency"],
            batch=step["batch"],
            prefetch=step["prefetch"],
            heartbeat=HEARTBEAT,
            poll=0.05,
            stalled_after=self.stalled,
            grace=10,
            retry_in=0,
            host=self.name,
        )
        with self.recorder.call(self.name, "worker"):
            worker.run(until_empty=True)

    def _upkeep(self, step: Step) -> None:
        """Clean up, or read: what may raise named errors, and nothing else."""
        run, key = self.locks.run, self.named("key", step["key"])
        calls: dict[str, Callable[[], Any]] = {
            "vacuum": lambda: run(sl.lock.vacuum()),
            "sweep": lambda: self.locks.sweep(stale_after=86400),
            "maintain": self.locks.maintain,
            "usage": lambda: run(sl.semaphore.usage()),
            "held": lambda: run(sl.Mutex().held()),
            "holders": lambda: run(sl.lock.holders(key)),
        }
        with self.recorder.call(self.name, step["task"]), contextlib.suppress(sl.Unsupported):
            calls[step["task"]]()

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        """An error of a statement of the workload's own is none of ``Locks``."""
        try:
            yield
        except RAW as error:
            raise GivenUp(str(error)) from error

    @contextlib.contextmanager
    def _rolled_back_unless_unknown(self, answer: Answer) -> Iterator[None]:
        try:
            yield
        except sl.OutcomeUnknown:
            raise
        except (sl.LockLost, GivenUp):
            answer.value = "rolled back"
            raise


def writes_of(step: Step) -> int:
    """How many entries of the ledger a body makes."""
    return sum(len(step["keys"]) if each == "write" else each == "nested" for each in step["body"])


def write(session: Session, key: str, call: str) -> None:
    """Read, add one, write: without a lock, what another transaction has written meanwhile is lost."""
    number = session.scalar(text("SELECT number FROM fault_value WHERE name = :name"), {"name": key})
    assert number is not None
    values = {"name": key, "number": number + 1, "call": call}
    session.execute(text("UPDATE fault_value SET number = :number WHERE name = :name"), values)
    session.execute(text("INSERT INTO fault_ledger (name, number, call_number) VALUES (:name, :number, :call)"), values)


def lost(grant: Any) -> bool:
    """Whether a lease says that it is lost."""
    target = getattr(grant, "_target", grant)
    return bool(target.lost)


@contextlib.contextmanager
def moved_clock(seconds: float) -> Iterator[None]:
    """Move the clock of this process, in what asks Python for the time of day."""
    real = time.time
    if seconds:
        time.time = lambda: real() + seconds  # type: ignore[method-assign]
    try:
        yield
    finally:
        time.time = real  # type: ignore[method-assign]


def run_in_process(pipe: Any, episode: Episode, index: int, prefix: str, url: str) -> None:
    """Run one client in this process, which sends its events through the pipe; it begins when it receives something."""
    logging.disable()  # what drivers write about connections that are cut
    guard = threading.Lock()

    def emit(what: dict[str, Any]) -> None:
        with guard:
            pipe.send(what)

    face = Face(episode.config, url)
    try:
        emit({"event": "ready"})
        pipe.recv()  # the others are ready, too
        with moved_clock(episode.config.skew):
            Client(f"client {index}", prefix, face, Recorder(emit, f"{prefix}{index} ")).run(episode.clients[index])
        emit({"event": "finished"})
    except BaseException:
        emit({"event": "crashed", "why": traceback.format_exc()[-4000:]})
    finally:
        face.close()

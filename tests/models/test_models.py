"""Every engine against a small model in Python: random sequences of operations have the same results and errors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sqlalchemy import Connection, Engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.testing import Clock
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import ENGINES

#: the same examples each time: `make torture` draws others
SETTINGS = settings(
    max_examples=int(os.environ.get("MODEL_EXAMPLES", "2")),
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
_numbers = itertools.count(1)
IDS = st.sampled_from(["a", "b", "c"])
OWNERS = st.sampled_from([None, "me", "you"])


@pytest.fixture(params=[*ENGINES])
def engine(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Engine:
    return engine_to(request.param, ENGINES[request.param])


def check(machine: type[Machine], engine: Engine, examples: settings = SETTINGS) -> None:
    run_state_machine_as_test(lambda: machine(engine), settings=examples)


class Machine(RuleBasedStateMachine):
    """Operations of one pattern, in a queue or with names of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.locks = engine, sl.Locks(engine)
        self.backend = backend_for(engine.dialect)
        self.prefix = f"model {next(_numbers)}"

    def same(self, operation: Any, expected: Callable[[], Any]) -> Any:
        """Run an operation, and assert that it returns or raises the same as the model."""
        try:
            wanted: Any = expected()
        except sl.LockError as error:
            with pytest.raises(type(error)):
                self.locks.run(operation)
            return None
        found = self.locks.run(operation)
        assert found == wanted, (operation, found, wanted)
        return found


@dataclass
class Row:
    """A mutex or a timeout."""

    retries: int | None
    held: bool = False
    owner: str | None = None
    fence: int = 0
    last: int = 0

    def take(self) -> None:
        self.fence += 1
        if self.retries is not None:
            self.retries -= 1

    @property
    def has_retries(self) -> bool:
        return self.retries is None or self.retries > 0


class Rows(Machine):
    """The common part of mutexes and timeouts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rows: dict[str, Row] = {}

    def row(self, id: str) -> Row:
        if id not in self.rows:
            raise sl.UnknownTask(id)
        return self.rows[id]

    def made(self, ids: list[str], retries: int | None) -> int:
        new = [id for id in dict.fromkeys(ids) if id not in self.rows]
        self.rows |= {id: Row(retries) for id in new}
        return len(new)


class MutexMachine(Rows):
    @rule(ids=st.lists(IDS, min_size=1, max_size=3), retries=st.sampled_from([None, 0, 2]))
    def create(self, ids: list[str], retries: int | None) -> None:
        ids = list(dict.fromkeys(ids))
        self.same(sl.Mutex().create(*ids, queue=self.prefix, retries=retries), lambda: self.made(ids, retries))

    @rule(id=IDS, owner=OWNERS, nowait=st.booleans())
    def acquire(self, id: str, owner: str | None, nowait: bool) -> None:
        operation = sl.Mutex().acquire(id, queue=self.prefix, owner=owner, nowait=nowait)
        self.same(operation, lambda: self.taken(self.row(id), owner))

    @rule(id=IDS)
    def acquire_token(self, id: str) -> None:
        def expected() -> int | None:
            row = self.row(id)
            return row.fence if self.taken(row, None) else None

        self.same(sl.Mutex().acquire_token(id, queue=self.prefix), expected)

    def taken(self, row: Row, owner: str | None) -> bool:
        if row.held or not row.has_retries:
            return False
        row.take()
        row.held, row.owner = True, owner
        return True

    @rule(id=IDS, owner=OWNERS)
    def release(self, id: str, owner: str | None) -> None:
        def expected() -> bool:
            row = self.row(id)
            released = row.held and owner in (None, row.owner)
            row.held = row.held and not released
            return released

        self.same(sl.Mutex().release(id, queue=self.prefix, owner=owner), expected)

    @rule(id=IDS, retries=st.sampled_from([None, 0, 1]))
    def set_retries(self, id: str, retries: int | None) -> None:
        def expected() -> bool:
            self.row(id).retries = retries
            return True

        self.same(sl.Mutex().set_retries(id, retries, queue=self.prefix), expected)

    @rule(limit=st.integers(1, 3))
    def capture(self, limit: int) -> None:
        free = [id for id, row in sorted(self.rows.items()) if not row.held and row.has_retries][:limit]
        self.same(sl.Mutex().capture(limit, queue=self.prefix), lambda: free)
        for id in free:
            self.taken(self.rows[id], None)

    @rule()
    def held(self) -> None:
        found = {row.id: row.owner for row in self.locks.run(sl.Mutex().held(10_000)) if row.queue == self.prefix}
        assert found == {id: row.owner for id, row in self.rows.items() if row.held}


class TimeoutMachine(Rows):
    """A timeout with a clock that the test sets."""

    EVERY = 60

    @initialize(windowed=st.booleans())
    def begin(self, windowed: bool) -> None:
        self.now, self.windowed = 1_800_000_000, windowed
        self.timeout = sl.Timeout(every=self.EVERY, windowed=windowed, clock=lambda: float(self.now))

    @rule(seconds=st.sampled_from([1, 30, 59, 60, 61, 600]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule(ids=st.lists(IDS, min_size=1, max_size=3, unique=True), retries=st.sampled_from([None, 0, 2]))
    def create(self, ids: list[str], retries: int | None) -> None:
        self.same(self.timeout.create(*ids, queue=self.prefix, retries=retries), lambda: self.made(ids, retries))

    @rule(id=IDS)
    def acquire(self, id: str) -> None:
        self.same(self.timeout.acquire(id, queue=self.prefix), lambda: self.taken(self.row(id)))

    @rule(id=IDS)
    def acquire_token(self, id: str) -> None:
        def expected() -> int | None:
            row = self.row(id)
            return row.fence if self.taken(row) else None

        self.same(self.timeout.acquire_token(id, queue=self.prefix), expected)

    def free(self, row: Row) -> bool:
        if self.windowed:
            return row.last // self.EVERY < self.now // self.EVERY and row.has_retries
        return row.last + self.EVERY < self.now and row.has_retries

    def taken(self, row: Row) -> bool:
        if not self.free(row):
            return False
        row.take()
        row.last = self.now
        return True


@dataclass
class Request:
    """A request, by its id."""

    permits: dict[str, int]
    fence: dict[str, int]
    state: str = "ACQUIRED"

    def counts(self, name: str) -> int:
        return self.permits.get(name, 0) if self.state == "ACQUIRED" else 0


@dataclass
class Room:
    capacity: int
    fence: int = 0
    deleted: bool = False


class SemaphoreMachine(Machine):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rooms: dict[str, Room] = {}
        self.requests: dict[str, Request] = {}

    def room(self, name: str) -> Room:
        if name not in self.rooms or self.rooms[name].deleted:
            raise sl.UnknownSemaphore(name)
        return self.rooms[name]

    def used(self, name: str) -> int:
        return sum(request.counts(name) for request in self.requests.values())

    def named(self, what: str) -> str:
        return f"{self.prefix} {what}"

    @rule(name=IDS, capacity=st.integers(1, 3))
    def create(self, name: str, capacity: int) -> None:
        def expected() -> bool:
            known = self.rooms.get(name)
            if known is not None and not known.deleted:
                return False
            self.rooms[name] = Room(capacity, known.fence if known else 0)
            return True

        self.same(sl.semaphore.create(self.named(name), capacity), expected)

    @rule(name=IDS, capacity=st.integers(1, 3))
    def resize(self, name: str, capacity: int) -> None:
        def expected() -> int:
            room = self.room(name)
            room.capacity, before = capacity, room.capacity
            return before

        self.same(sl.semaphore.resize(self.named(name), capacity), expected)

    @rule(name=IDS)
    def delete(self, name: str) -> None:
        def expected() -> None:
            room = self.room(name)
            if self.used(name):
                raise sl.SemaphoreHeld(name)
            room.deleted = True

        self.same(sl.semaphore.delete(self.named(name)), expected)

    @rule(permits=st.dictionaries(IDS, st.integers(1, 2), min_size=1, max_size=2), ident=st.sampled_from("xyz"))
    def acquire(self, permits: dict[str, int], ident: str) -> None:
        operation = sl.semaphore.acquire(
            {self.named(name): count for name, count in permits.items()}, external_id=self.named(ident), ttl=3600
        )
        known = self.requests.get(ident)
        if known is not None:
            if known.permits != permits:
                with pytest.raises((sl.IdempotencyConflict, sl.UnknownSemaphore)):
                    self.locks.run(operation)
                return
            grant = self.locks.run(operation)
            assert (grant.replayed, grant.acquired) == (True, known.state == "ACQUIRED")
            assert grant.state == known.state or known.state == "EXPIRED"
            return
        try:
            rooms = {name: self.room(name) for name in permits}
        except sl.UnknownSemaphore:
            with pytest.raises(sl.UnknownSemaphore):
                self.locks.run(operation)
            return
        grant = self.locks.run(operation)
        full = {name for name, count in permits.items() if self.used(name) + count > rooms[name].capacity}
        assert grant.acquired is not bool(full), (grant, full)
        if full:
            assert grant.exhausted
            assert set(grant.exhausted) <= set(map(self.named, full))
            return
        for room in rooms.values():
            room.fence += 1
        assert grant.fence == {self.named(name): room.fence for name, room in rooms.items()}
        self.requests[ident] = Request(permits, dict(grant.fence))

    @rule(ident=st.sampled_from("xyz"))
    def release(self, ident: str) -> None:
        request = self.requests.get(ident)
        found = self.locks.run(sl.semaphore.release(self.named(ident)))
        if request is None:
            assert found == "UNKNOWN"
        elif request.state == "EXPIRED":  # it may have been released after it expired
            assert found in ("RELEASED", "ALREADY_RELEASED")
            request.state = "RELEASED"
        else:
            assert found == ("RELEASED" if request.state == "ACQUIRED" else "ALREADY_RELEASED")
            request.state = "RELEASED"

    @rule(ident=st.sampled_from("xyz"))
    def renew(self, ident: str) -> None:
        request = self.requests.get(ident)
        held = request is not None and request.state == "ACQUIRED"
        self.same(sl.semaphore.renew(self.named(ident)), lambda: held)

    @precondition(lambda self: any(request.state == "ACQUIRED" for request in self.requests.values()))
    @rule()
    def expire(self) -> None:
        Clock(self.engine).advance(3700)
        for request in self.requests.values():
            if request.state == "ACQUIRED":
                request.state = "EXPIRED"

    @rule()
    def usage(self) -> None:
        found = {
            row.name: row for row in self.locks.run(sl.semaphore.usage()) if row.name.startswith(f"{self.prefix} ")
        }
        assert {name: row.capacity for name, row in found.items()} == {
            self.named(name): room.capacity for name, room in self.rooms.items() if not room.deleted
        }


@dataclass
class Job:
    payload: int
    priority: int
    order: int
    max_attempts: int
    state: str = "waiting"
    attempts: int = 0
    row: Any = None


class QueueMachine(Machine):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.queue = sl.Queue()
        self.jobs: list[Job] = []
        self.order = itertools.count()

    @rule(priority=st.integers(0, 2), max_attempts=st.integers(1, 3))
    def put(self, priority: int, max_attempts: int) -> None:
        number, ident = len(self.jobs), uuid4()
        put = self.queue.put(number, queue=self.prefix, priority=priority, max_attempts=max_attempts, external_id=ident)
        for _ in range(2):  # an id is put once
            assert str(self.locks.run(put)) == str(ident)
        self.jobs.append(Job(number, priority, next(self.order), max_attempts))

    @rule(limit=st.integers(1, 3))
    def capture(self, limit: int) -> None:
        waiting = sorted(
            (job for job in self.jobs if job.state == "waiting"), key=lambda job: (job.priority, job.order)
        )
        found = self.locks.run(self.queue.capture(limit, queue=self.prefix))
        assert [row.payload for row in found] == [job.payload for job in waiting[:limit]]
        for row in found:
            job = self.jobs[row.payload]
            job.state, job.row = "running", row
            job.attempts += 1
            assert row.attempts == job.attempts

    def owner(self, number: int) -> Job | None:
        """A job that was captured once, or is running."""
        known = [job for job in self.jobs if job.row is not None]
        return known[number % len(known)] if known else None

    @rule(
        number=st.integers(0, 9),
        what=st.sampled_from(["complete", "release", "fail", "fail_later", "kill"]),
    )
    def finish(self, number: int, what: str) -> None:
        job = self.owner(number)
        if job is None:
            return
        ours = job.state == "running"
        operations = {
            "complete": lambda: self.queue.complete(job.row),
            "release": lambda: self.queue.release(job.row),
            "fail": lambda: self.queue.fail(job.row, error="no", retry_in=0),
            "fail_later": lambda: self.queue.fail(job.row, error="no", retry_in=3600),
            "kill": lambda: self.queue.fail(job.row, error="no", retry=False),
        }
        self.same(operations[what](), lambda: int(ours))
        if not ours:
            return
        if what == "release":
            job.attempts -= 1
        if what == "complete":
            job.state = "completed"
        elif what == "kill" or (what.startswith("fail") and job.attempts >= job.max_attempts):
            job.state = "dead"
        else:
            job.state = "scheduled" if what == "fail_later" else "waiting"
            if what == "fail":
                job.order = next(self.order)

    @rule()
    def a_day_passes(self) -> None:
        """Running jobs are stalled, and requeued after the pause of a failed attempt; scheduled jobs are due."""
        running = [job for job in self.jobs if job.state == "running"]
        Clock(self.engine).advance(86400)
        assert self.locks.run(self.queue.requeue_stalled(3600, queue=self.prefix)) == len(running)
        Clock(self.engine).advance(86400)
        for job in running:
            job.state = "dead" if job.attempts >= job.max_attempts else "waiting"
            job.order = next(self.order)
        later = [job for job in self.jobs if job.state == "scheduled"]
        for job in later:
            job.state = "waiting"
        assert self.stats() == self.counted()
        self.work_off()

    @precondition(lambda self: any(job.state == "dead" for job in self.jobs))
    @rule()
    def revive(self) -> None:
        dead = [job for job in self.jobs if job.state == "dead"]
        assert self.locks.run(self.queue.revive(queue=self.prefix)) == len(dead)
        for job in dead:
            job.state, job.attempts = "waiting", 0
        assert self.stats() == self.counted()
        self.work_off()

    def work_off(self) -> None:
        """Complete the due jobs, whose order depends on when they failed or were revived."""
        while found := self.locks.run(self.queue.capture(10, queue=self.prefix)):
            for row in found:
                job = self.jobs[row.payload]
                assert job.state == "waiting"
                job.state, job.row = "completed", row
            assert self.locks.run(self.queue.complete(found)) == len(found)
        assert not [job for job in self.jobs if job.state == "waiting"]

    def stats(self) -> tuple[int, ...]:
        for row in self.locks.run(self.queue.stats()):
            if row.queue_id == self.prefix:
                return row.waiting, row.scheduled, row.running, row.dead
        return 0, 0, 0, 0

    def counted(self) -> tuple[int, ...]:
        states = [job.state for job in self.jobs]
        return tuple(map(states.count, ("waiting", "scheduled", "running", "dead")))

    @rule()
    def count(self) -> None:
        assert self.stats() == self.counted()


class LockMachine(Machine):
    """Three transactions that try, and never wait."""

    KEYS = ("a", "b")

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.connections: list[Connection] = [engine.connect() for _ in range(3)]
        #: by connection and key: whether it is exclusive
        self.held: dict[tuple[int, str], bool] = {}
        self.locks.run(sl.lock.create(*(self.named(key) for key in self.KEYS)))

    def named(self, key: str) -> str:
        return f"{self.prefix} {key}"

    def teardown(self) -> None:
        for connection in self.connections:
            connection.close()

    @rule(who=st.integers(0, 2), key=st.sampled_from(KEYS), shared=st.booleans())
    def attempt(self, who: int, key: str, shared: bool) -> None:
        one_lock = self.backend.single_writer
        others = [
            exclusive
            for (other, name), exclusive in self.held.items()
            if other != who and (one_lock or name == key) and (exclusive or one_lock or not shared)
        ]
        operation = (sl.lock.try_shared if shared else sl.lock.try_exclusive)(self.named(key))
        got = self.connections[who].scalar(operation)
        assert got is not bool(others), (who, key, shared, self.held)
        if got:
            self.held[who, key] = self.held.get((who, key), False) or not shared

    @rule(who=st.integers(0, 2), commit=st.booleans())
    def end(self, who: int, commit: bool) -> None:
        connection = self.connections[who]
        connection.commit() if commit else connection.rollback()
        self.held = {held: exclusive for held, exclusive in self.held.items() if held[0] != who}


@pytest.mark.parametrize(
    "machine",
    [MutexMachine, TimeoutMachine, SemaphoreMachine, QueueMachine, LockMachine],
    ids=lambda each: each.__name__,
)
def test_engine_answers_as_the_model(machine: type[Machine], engine: Engine) -> None:
    check(machine, engine)


def unguarded(real: Any) -> Any:
    """A release that doesn't compare the owner."""
    return lambda self, id, *, queue=None, owner=None: real(self, id, queue=queue)


def a_second_early(real: Any) -> Any:
    """A timeout whose period ends too early."""
    return lambda self, *, every, **options: real(self, every=every - 1, **options)


def undercounted(real: Any) -> Any:
    """An acquire that counts one permit where two are asked for."""
    return lambda permits, **options: real(dict.fromkeys(permits, 1), **options)


def not_due(real: Any) -> Any:
    """A job that is put for an hour later."""
    return lambda self, *payloads, **options: real(self, *payloads, run_in=3600, **options)


def shared_only(real: Any) -> Any:
    """An exclusive lock that others share."""
    return sl.lock.try_shared


@pytest.mark.parametrize(
    ("machine", "where", "name", "bug"),
    [
        (MutexMachine, sl.Mutex, "release", unguarded),
        (TimeoutMachine, sl.Timeout, "__init__", a_second_early),
        (SemaphoreMachine, sl.semaphore, "acquire", undercounted),
        (QueueMachine, sl.Queue, "put", not_due),
        (LockMachine, sl.lock, "try_exclusive", shared_only),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_bug_differs_from_the_model(
    engine_to: MakeEngine, monkeypatch: pytest.MonkeyPatch, machine: type[Machine], where: Any, name: str, bug: Any
) -> None:
    monkeypatch.setattr(where, name, bug(getattr(where, name)))
    # it ends with the first that differs; which ones are drawn depends on the modules that are loaded
    examples = settings(SETTINGS, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False)
    # SQLite has one lock for all keys, and none that is shared
    engine = engine_to("postgresql15" if machine is LockMachine else "sqlite")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(machine, engine, examples)

"""Every engine against a small model in Python: random sequences of operations have the same results and errors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sqlalchemy import Engine

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


@pytest.mark.parametrize(
    "machine",
    [MutexMachine, TimeoutMachine, SemaphoreMachine],
    ids=lambda each: each.__name__,
)
def test_engine_answers_as_the_model(machine: type[Machine], engine: Engine) -> None:
    run_state_machine_as_test(lambda: machine(engine), settings=SETTINGS)

"""One connection dies, at whatever request of whatever operation: what is said of it afterwards is true.

Each operation is run again and again; its connection dies at its first request, at its second, and so on until there
is no such request. It does so before the server gets the request, or after the server has executed it. The operation
is then done, its repetition included; or it says what is so: ``LockLost`` where nothing is committed, and
``OutcomeUnknown`` where that can't be known, and it can't be done twice. No error of a driver's leaves ``Locks``, and
nothing stays held, or checked out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, Integer, NullPool, String, delete, event, func, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.facade.maintenance import QUEUE
from tests.conformance.faces import ASYNC, SYNC, opened
from tests.faults.proxy import Proxy, encryption
from tests.fixtures.parties import PATIENCE, connected, installed, unused
from tests.fixtures.queues import silenced
from tests.fixtures.semaphores import expire, held

#: which driver, on which façade, and whether it speaks TLS
WAYS = {
    "psycopg-tls": ("postgresql15", "psycopg", SYNC),
    "psycopg2": ("postgresql15", "psycopg2", SYNC),
    "yugabytedb": ("yugabytedb", "yugabytedb", SYNC),
    "pymysql": ("mysql", "pymysql", SYNC),
    "pymysql-tls": ("mysql", "pymysql", SYNC),
    "mariadb": ("mariadb", "mariadb+pymysql", SYNC),
    "async-psycopg": ("postgresql15", "psycopg", ASYNC),
    "asyncpg-tls": ("postgresql15", "asyncpg", ASYNC),
    # not with TLS: aiomysql leaves a transport open where it begins with it
    "aiomysql": ("mysql", "aiomysql", ASYNC),
    "asyncmy-tls": ("mysql", "asyncmy", ASYNC),
}


def only_the_dead_one(engine: Engine) -> None:
    """A connection's death is not held against the others of the pool."""

    def keep(context: Any) -> None:
        context.invalidate_pool_on_disconnect = False

    event.listen(engine, "handle_error", keep)


#: how an app may have made its engine, and what it may have it do
HABITS: dict[str, tuple[dict[str, Any], Callable[[Engine], None]]] = {
    "": ({}, lambda engine: None),
    "serializable": ({"isolation_level": "SERIALIZABLE"}, lambda engine: None),
    "autocommit": ({"isolation_level": "AUTOCOMMIT"}, lambda engine: None),
    "option": ({"execution_options": {"isolation_level": "SERIALIZABLE"}}, lambda engine: None),
    "unpooled": ({"poolclass": NullPool}, lambda engine: None),
    "kept": ({}, only_the_dead_one),
}
#: the drivers that they are tried with
HABITUAL = ("psycopg2", "pymysql")


class Base(DeclarativeBase):
    pass


class Note(Base):
    """What an app writes under a lock."""

    __tablename__ = "note_of_a_death"
    id: Mapped[str] = mapped_column(String(60), primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="new")
    number: Mapped[int] = mapped_column(Integer, default=0)
    fence: Mapped[int] = sl.Fence()


class Import(Base):
    """A mutex without a column for the nonce."""

    __tablename__ = "import_of_a_death"
    name: Mapped[str] = mapped_column(String(60), primary_key=True)
    locked: Mapped[bool]


mutex, tasks, queue = sl.Mutex(), sl.StateTransition(), sl.Queue()
imports = sl.Mutex(Import, id=Import.name, acquired=Import.locked)


@dataclass
class Way:
    """A façade with one connection, which dies, and the same database by another one, which doesn't."""

    name: str
    locks: Any
    engine: Engine
    proxy: Proxy
    other: Engine
    direct: sl.Locks

    def rows(self, statement: Any) -> list[Any]:
        with self.other.connect() as connection:
            return list(connection.execute(statement))

    def write(self, statement: Any) -> None:
        with self.other.begin() as connection:
            connection.execute(statement)

    def of(self, table: str, **named: Any) -> Any:
        """The rows of a shipped table."""
        shipped = getattr(build_context(self.other.dialect, {}).tables, table)
        return self.rows(select(shipped).where(*(shipped.c[key] == value for key, value in named.items())))

    @property
    def commits(self) -> bool:
        """Whether what the connection died of was the end of its transaction, or a transaction of its own."""
        commit = re.compile(rb"\bCOMMIT\b")
        return (
            self.alone or bool(commit.search(self.proxy.fatal or b"")) or not any(map(commit.search, self.undisturbed))
        )

    #: the app's engine is in autocommit
    alone: bool = False
    #: the pool resets the level of its connections
    resets_level: bool = False
    #: what was asked for when nothing died
    undisturbed: tuple[bytes, ...] = ()


@pytest.fixture(scope="module")
def way(servers: Any, request: pytest.FixtureRequest) -> Iterator[Way]:
    way_, _, habit = request.param.partition("/")
    name, driver, face = WAYS[way_]
    tls = way_.endswith("-tls")
    more, accustom = HABITS[habit]
    with ExitStack() as stack:
        other = stack.enter_context(connected(installed(servers, name)))
        Base.metadata.create_all(other)
        proxy = stack.enter_context(Proxy(installed(servers, name, driver)))
        options = more if "poolclass" in more else {"pool_size": 5, "pool_timeout": PATIENCE, **more}
        arguments = encryption(driver, tls=tls)
        emptied(other)
        locks, engine = stack.enter_context(opened(face, proxy.url, connect_args=arguments, **options))
        accustom(engine)
        yield Way(
            name, locks, engine, proxy, other, sl.Locks(other), habit == "autocommit", habit in ("autocommit", "option")
        )
        assert (proxy.encrypted == proxy.accepted) if tls else not proxy.encrypted


def emptied(engine: Engine) -> None:
    """What other tests have left would make each look a longer one."""
    tables = build_context(engine.dialect, {}).tables
    with engine.begin() as connection:
        for table in (tables.permit, tables.permit_request, tables.semaphore_history, tables.semaphore):
            connection.execute(delete(table))
        for table in (tables.job, tables.task, tables.task_state, tables.task_timeout):
            connection.execute(delete(table))


@dataclass
class Said:
    """What an operation has answered, or raised."""

    value: Any = None
    error: BaseException | None = None

    @property
    def unknown(self) -> bool:
        return isinstance(self.error, sl.OutcomeUnknown)

    @property
    def lost(self) -> bool:
        return isinstance(self.error, sl.LockLost) and not self.unknown

    def done(self) -> Any:
        assert self.error is None, repr(self.error)
        return self.value


class OfTheApp(Exception):
    """A statement of the app's own has failed."""


Act, Judge = Callable[[Any], Any], Callable[[Said], None]
CASES: dict[str, Callable[[Way], tuple[Act, Judge]]] = {}


def case(function: Callable[[Way], tuple[Act, Judge]]) -> Callable[[Way], tuple[Act, Judge]]:
    """An operation: what is done, and the judgement of what it said, by the state that the database is in."""
    CASES[function.__name__] = function
    return function


def repeated(value: Any, read: Callable[[], Any], after: Any) -> Judge:
    """Judge what may be done again: it is done.

    :param value: what the operation returns. :param read: reads the state of the database, ``after`` in the end.
    """

    def judge(said: Said) -> None:
        assert (said.done(), read()) == (value, after)

    return judge


def once_at_most(way: Way, value: Any, read: Callable[[], Any], after: Any) -> Judge:
    """Judge what must not be done twice: it is done, or it can't be known whether it is."""
    before = read()

    def judge(said: Said) -> None:
        if said.unknown:
            assert way.commits
            assert read() in (before, after)
        else:
            assert (said.done(), read()) == (value, after)

    return judge


# blocks


def free(way: Way, *keys: str) -> None:
    """No transaction holds a key."""
    with way.direct.exclusive(*keys, timeout=PATIENCE):  # the server may not have noticed a death yet
        pass


@case
def exclusive(way: Way) -> tuple[Act, Judge]:
    keys, inside = (unused(), unused()), []

    def act(locks: Any) -> None:
        with locks.exclusive(*keys, timeout=PATIENCE):
            inside.append(True)

    def judge(said: Said) -> None:
        assert inside == [True]
        assert said.lost or said.done() is None
        free(way, *keys)

    return act, judge


@case
def exclusive_refused(way: Way) -> tuple[Act, Judge]:
    key = unused()
    holder = way.other.connect()
    holder.execute(sl.lock.exclusive(key))

    def act(locks: Any) -> None:
        with locks.exclusive(key, timeout=0):
            raise AssertionError

    def judge(said: Said) -> None:
        holder.close()
        assert isinstance(said.error, sl.LockTimeout), repr(said.error)

    return act, judge


@case
def shared(way: Way) -> tuple[Act, Judge]:
    key = unused()

    def act(locks: Any) -> None:
        with locks.shared(key, timeout=PATIENCE) as held:
            held.check()

    def judge(said: Said) -> None:
        assert said.lost or said.done() is None
        free(way, key)

    return act, judge


@case
def worked(way: Way) -> tuple[Act, Judge]:
    key, id = unused(), unused("note")

    def act(locks: Any) -> None:
        with locks.exclusive(key, timeout=PATIENCE) as held:
            try:
                held.session.execute(insert(Note).values(id=id, status="new", number=0, fence=0))
                held.session.execute(update(Note).where(Note.id == id).values(number=1))
            except DBAPIError as error:
                raise OfTheApp from error

    def judge(said: Said) -> None:
        written = way.rows(select(Note.number).where(Note.id == id))
        if isinstance(said.error, OfTheApp) or said.lost:
            assert written == []
        elif said.unknown:
            assert way.commits
        else:
            assert (said.done(), written) == (None, [(1,)])
        free(way, key)

    return act, judge


# mutexes and timeouts


def mutex_row(way: Way, id: str) -> Callable[[], Any]:
    return lambda: [(row.acquired, row.fence) for row in way.of("task_state", id=id)]


@case
def mutex_first_use(way: Way) -> tuple[Act, Judge]:
    id = unused("mutex")

    def judge(said: Said) -> None:
        repeated(1, mutex_row(way, id), [(True, 1)])(said)
        assert way.locks.mutex.release(id) is True  # by its own release

    return lambda locks: locks.mutex.acquire_token(id), judge


@case
def mutex_release(way: Way) -> tuple[Act, Judge]:
    id = unused("mutex")
    assert way.locks.mutex.acquire(id) is True
    return lambda locks: locks.mutex.release(id), repeated(True, mutex_row(way, id), [(False, 1)])


@case
def mutex_release_of_anothers(way: Way) -> tuple[Act, Judge]:
    id = unused("mutex")
    assert way.direct.mutex.acquire(id) is True
    return lambda locks: locks.mutex.release(id), once_at_most(way, True, mutex_row(way, id), [(False, 1)])


@case
def mutex_nowait(way: Way) -> tuple[Act, Judge]:
    id = unused("mutex")
    way.direct.run(mutex.create(id))
    acquiring = mutex.acquire(id, nowait=True)
    return lambda locks: locks.run(acquiring), repeated(True, mutex_row(way, id), [(True, 1)])


@case
def mutex_without_nonce(way: Way) -> tuple[Act, Judge]:
    name = unused("import")
    way.direct.run(imports.create(name))
    judge = once_at_most(way, True, lambda: way.rows(select(Import.locked).where(Import.name == name)), [(True,)])
    return lambda locks: locks.run(imports.acquire(name)), judge


@case
def once_per_first_use(way: Way) -> tuple[Act, Judge]:
    id = unused("timeout")
    judge = repeated(True, lambda: [row.fence for row in way.of("task_timeout", id=id)], [1])
    return lambda locks: locks.once_per(id, every=3600), judge


# semaphores


def room(way: Way, capacity: int = 2) -> str:
    name = unused("room")
    assert way.direct.run(sl.semaphore.create(name, capacity)) is True
    return name


@case
def semaphore_acquire(way: Way) -> tuple[Act, Judge]:
    first, second = room(way), room(way)

    def judge(said: Said) -> None:
        grant = said.done()
        assert (grant.acquired, dict(grant.fence)) == (True, {first: 1, second: 1})
        assert (held(way.other, first), held(way.other, second)) == (1, 2)
        assert way.direct.release(grant) is sl.Released.RELEASED
        assert (held(way.other, first), held(way.other, second)) == (0, 0)

    return lambda locks: locks.acquire({second: 2, first: 1}, ttl=3600, timeout=PATIENCE), judge


@case
def semaphore_refused(way: Way) -> tuple[Act, Judge]:
    name = room(way)
    way.direct.acquire({name: 2})

    def judge(said: Said) -> None:
        assert isinstance(said.error, sl.LockTimeout), repr(said.error)
        assert "had no room" in str(said.error)
        assert held(way.other, name) == 2

    return lambda locks: locks.acquire({name: 1}, timeout=0), judge


@case
def semaphore_of_what_expired(way: Way) -> tuple[Act, Judge]:
    name = room(way)
    with way.other.begin() as connection:
        expire(connection, way.direct.acquire({name: 2}, ttl=3600))
    judge = repeated(True, lambda: held(way.other, name), 1)
    return lambda locks: locks.acquire({name: 1}, timeout=PATIENCE).acquired, judge


@case
def semaphore_renew(way: Way) -> tuple[Act, Judge]:
    name = room(way)
    grant = way.direct.acquire({name: 1}, ttl=3600)
    return lambda locks: locks.renew(grant), repeated(True, lambda: held(way.other, name), 1)


@case
def semaphore_release(way: Way) -> tuple[Act, Judge]:
    name = room(way)
    grant = way.direct.acquire({name: 1})

    def act(locks: Any) -> bool:
        # what the last try found: an earlier one may have done it
        return locks.release(grant) in (sl.Released.RELEASED, sl.Released.ALREADY_RELEASED)

    return act, repeated(True, lambda: held(way.other, name), 0)


@case
def lease(way: Way) -> tuple[Act, Judge]:
    name = unused("lease")

    def act(locks: Any) -> None:
        with locks.lease(name, ttl=3600, timeout=PATIENCE) as grant:
            grant.check()
            assert held(way.other, name) == 1

    return act, repeated(None, lambda: held(way.other, name), 0)


def noted(way: Way, *ids: str) -> None:
    way.write(insert(Note).values([{"id": id, "status": ids[0][:20], "number": 0, "fence": 0} for id in ids]))


def incremented(way: Way, id: str, operation: Callable[[Any], Any]) -> tuple[Act, Judge]:
    write = update(Note).where(Note.id == id).values(number=Note.number + 1)
    judge = once_at_most(way, True, lambda: way.rows(select(Note.number).where(Note.id == id)), [(1,)])
    return lambda locks: locks.run(operation(write)), judge


@case
def guarded(way: Way) -> tuple[Act, Judge]:
    id, grant = unused("note"), way.direct.acquire({room(way): 1}, ttl=3600)
    noted(way, id)
    return incremented(way, id, lambda write: sl.guarded(write, grant))


@case
def fenced(way: Way) -> tuple[Act, Judge]:
    id = unused("note")
    noted(way, id)
    return incremented(way, id, lambda write: sl.fenced(write, Note.fence, 7))


@case
def sweep(way: Way) -> tuple[Act, Judge]:
    name = room(way)
    with way.other.begin() as connection:
        expire(connection, way.direct.acquire({name: 1}, ttl=3600))
    way.direct.acquire({name: 1}, owner="dead")

    def act(locks: Any) -> bool:
        # what the tries that were answered have released
        return locks.sweep(alive=lambda owners: [owner for owner in owners if owner != "dead"]) in range(3)

    return act, repeated(True, lambda: held(way.other, name), 0)


# captures, queues, and the rest


@case
def transition_capture(way: Way) -> tuple[Act, Judge]:
    name = unused("queue")
    way.direct.run(tasks.create("a", "b", queue=name))

    def read() -> list[str]:
        return [row.id for row in way.of("task", queue_id=name) if row.status == "in_progress"]

    capturing = tasks.capture(2, queue=name)
    return lambda locks: [row.id for row in locks.run(capturing)], once_at_most(way, ["a", "b"], read, ["a", "b"])


@case
def capture_of_entities(way: Way) -> tuple[Act, Judge]:
    ids = sorted((unused("note"), unused("note")))
    noted(way, *ids)
    capturing = sl.capture(
        Note, where=Note.status == ids[0][:20], values={"status": "taken"}, order_by=Note.id, limit=2
    )
    count = select(func.count()).where(Note.id.in_(ids), Note.status == "taken")
    judge = once_at_most(way, ids, lambda: way.rows(count), [(2,)])
    return lambda locks: [note.id for note in locks.run(capturing)], judge


@case
def queue_put(way: Way) -> tuple[Act, Judge]:
    name = unused("queue")

    def judge(said: Said) -> None:
        assert [row.external_id for row in way.of("job", queue_id=name)] == [said.done()]

    return lambda locks: locks.run(queue.put({"n": 1}, queue=name)), judge


def with_a_job(way: Way) -> str:
    name = unused("queue")
    way.direct.run(queue.put({"n": 1}, queue=name))
    return name


@case
def queue_capture(way: Way) -> tuple[Act, Judge]:
    name = with_a_job(way)

    def act(locks: Any) -> Any:
        (job,) = locks.run(queue.capture(5, queue=name, host="web-1"))
        (row,) = way.of("job", queue_id=name)
        return (job.internal_id, job.claim) == (row.internal_id, row.claim)

    def read() -> list[bool]:
        return [row.started_at is not None for row in way.of("job", queue_id=name)]

    return act, once_at_most(way, True, read, [True])


@case
def queue_complete(way: Way) -> tuple[Act, Judge]:
    name = with_a_job(way)
    (job,) = way.direct.run(queue.capture(queue=name, host="web-1"))

    def read() -> list[bool]:
        return [row.completed_at is not None for row in way.of("job", queue_id=name)]

    return lambda locks: locks.run(queue.complete(job)), once_at_most(way, 1, read, [True])


@case
def queue_requeue(way: Way) -> tuple[Act, Judge]:
    name = with_a_job(way)
    with way.other.begin() as connection:
        silenced(connection, *connection.execute(queue.capture(queue=name)).all())
    requeueing = queue.requeue_stalled(3600, queue=name)
    judge = repeated(True, lambda: [row.started_at for row in way.of("job", queue_id=name)], [None])
    return lambda locks: locks.run(requeueing) in range(2), judge  # how many the last try found


@case
def reads(way: Way) -> tuple[Act, Judge]:
    queue_id, id, name = unused("queue"), unused("mutex"), room(way)
    way.direct.run(queue.put({"n": 1}, queue=queue_id))
    way.direct.mutex.acquire(id, owner="me")
    way.direct.acquire({name: 1}, owner="me")

    def act(locks: Any) -> Any:
        return (
            [row.waiting for row in locks.run(queue.stats()) if row.queue_id == queue_id],
            [row.owner for row in locks.run(mutex.held(100_000)) if row.id == id],
            [row.used for row in locks.run(sl.semaphore.usage()) if row.name == name],
        )

    def judge(said: Said) -> None:
        assert said.done() == ([1], ["me"], [1])
        way.direct.mutex.release(id)

    return act, judge


@case
def keys(way: Way) -> tuple[Act, Judge]:
    def act(locks: Any) -> Any:
        return locks.run(sl.lock.create(unused(), unused())) in range(3), locks.run(sl.lock.vacuum()) >= 0

    return act, repeated((True, True), lambda: None, None)


@case
def maintain(way: Way) -> tuple[Act, Judge]:
    shipped = build_context(way.other.dialect, {}).tables.task_timeout
    way.write(update(shipped).where(shipped.c.queue_id == QUEUE).values(ts=int(time.time())))
    way.write(update(shipped).where(shipped.c.queue_id == QUEUE, shipped.c.id == "orphans").values(ts=0))
    name = room(way)
    with way.other.begin() as connection:
        expire(connection, way.direct.acquire({name: 1}, ttl=3600))
    return lambda locks: "orphans" in locks.maintain().done, repeated(True, lambda: held(way.other, name), 0)


def assert_checked_in(way: Way) -> None:
    # SQLAlchemy counts a connection that dies while the pool resets its level as checked out
    if not (isinstance(way.engine.pool, NullPool) or way.resets_level):
        assert way.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def said(way: Way, act: Act) -> Said:
    try:
        return Said(value=act(way.locks))
    except (Exception, pytest.fail.Exception) as error:
        return Said(error=error)


#: one driver of each protocol, in every operation
THOROUGH = ("psycopg2", "pymysql")
#: elsewhere: one for each way in which an operation is run
BRIEF = [worked, mutex_first_use, mutex_release_of_anothers, capture_of_entities, semaphore_acquire]
#: and with an app's own habits, or when it has begun with a connection that was dead
BRIEFEST = [worked, mutex_release_of_anothers]
CELLS = [
    *((each, name, True) for each in THOROUGH for name in CASES),
    # a driver can't tell whether a request without a reply was executed
    *((THOROUGH[0], name, False) for name in CASES),
    *((THOROUGH[1], case.__name__, False) for case in BRIEF),
    *((each, case.__name__, True) for each in WAYS if each not in THOROUGH for case in BRIEF),
    *((f"{each}/{habit}", case.__name__, True) for each in HABITUAL for habit in HABITS if habit for case in BRIEFEST),
]


@pytest.mark.parametrize(
    ("way", "name", "executed"),
    CELLS,
    indirect=["way"],
    ids=[f"{way}-{name}-{'executed' if executed else 'unsent'}" for way, name, executed in CELLS],
)
def test_outcome_after_a_connection_died(way: Way, name: str, executed: bool) -> None:
    act, judge = CASES[name](way)
    way.proxy.die_at(0, executed=executed)
    judge(said(way, act))
    way.undisturbed = tuple(way.proxy.asked)
    number = 0
    while True:
        number += 1
        act, judge = CASES[name](way)
        way.proxy.die_at(number, executed=executed)
        found = said(way, act)
        if way.proxy.fatal is None:
            break
        request = f"{'after' if executed else 'before'} no. {number}, {way.proxy.fatal!r}, of {way.proxy.asked}"
        try:
            judge(found)
            assert_checked_in(way)
        except Exception as wrong:
            wrong.add_note(request) if hasattr(wrong, "add_note") else None
            raise
    way.proxy.die_at(0, executed=executed)  # by which it is made sure that nothing dies any more
    judge(found)
    assert number > 1


@pytest.mark.parametrize(("way", "name"), [(way, case.__name__) for way in WAYS for case in BRIEFEST], indirect=["way"])
def test_pool_of_connections_that_the_server_closed(way: Way, name: str) -> None:
    """As after each failover, and each time that the server ends what was idle."""
    act, judge = CASES[name](way)
    connections = [way.engine.connect() for _ in range(3)] if isinstance(way.locks, sl.Locks) else []
    for connection in connections:
        connection.close()
    way.proxy.die_at(0, executed=False)
    way.proxy.cut()
    judge(said(way, act))
    assert_checked_in(way)

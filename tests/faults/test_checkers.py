"""Each checker finds the bug of a known-broken version; ``test_torture`` shows that it finds none in this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select, text, update
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers.running_job import RunningJob
from tests.faults import broken, checkers
from tests.faults.checkers import Entry, Job
from tests.faults.history import History, Recorder
from tests.faults.tables import Document, Task, metadata
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, later, unused
from tests.fixtures.queues import put, silenced

SERVER = "postgresql15"


class Story:
    """Clients with a connection each, on an engine with the broken tables, and their history."""

    def __init__(self, engine: Engine, stack: ExitStack) -> None:
        self.engine, self._stack = engine, stack
        self.history = History()
        self.recorder = Recorder(self.history.apply)
        with engine.begin() as connection:
            broken.install(connection)
            metadata.create_all(connection)
            connection.execute(text("DELETE FROM broken_job"))

    def client(self, **options: Any) -> Connection:
        return self._stack.enter_context(self.engine.connect().execution_options(**options))

    def room(self) -> str:
        """A row with one permit, or one turn."""
        name = unused("room")
        with self.engine.begin() as connection:
            connection.execute(text("INSERT INTO broken_room VALUES (:name, 1, 0)"), {"name": name})
        return name


@pytest.fixture
def story(engine_to: MakeEngine) -> Iterator[Story]:
    with ExitStack() as stack:
        yield Story(engine_to(SERVER), stack)


def test_deleted_key_has_two_holders(story: Story, watch: Callable[[str], Watch]) -> None:
    a, b, c = (story.client() for _ in range(3))
    key = sl.lock.key(unused())
    broken.PublishedLock.exclusive(a, key)
    a.commit()  # the key's row is there
    broken.PublishedLock.exclusive(a, key)
    second = later(broken.PublishedLock.exclusive, b, key)
    watch(SERVER).until_waiting(second)
    broken.PublishedLock.unlock(a, key)
    a.commit()
    second.result(PATIENCE)
    hold = story.recorder.hold("b", "key")
    broken.PublishedLock.exclusive(c, key)
    story.recorder.hold("c", "key").leave()
    hold.leave()
    assert checkers.exclusion(story.history)


@pytest.mark.parametrize("known", [False, True], ids=["fault unknown", "fault known"])
def test_answer_that_is_read_after_its_connection_died(
    story: Story, watch: Callable[[str], Watch], engine_to: MakeEngine, known: bool
) -> None:
    server, key = watch(SERVER), unused()
    block = sl.Locks(story.engine).exclusive(key)
    with story.recorder.call("a", "block", key) as entered:
        held = block.__enter__()
    with story.recorder.fault("terminate") if known else ExitStack():
        server.kill(server.backend(held.session.connection()))
    with sl.Locks(engine_to(SERVER)).exclusive(key, timeout=PATIENCE):
        second = story.recorder.hold("b", key)
        story.recorder.hold("a", key, call=entered.call)  # as if the client had been slow to read the answer
        second.leave()
    with suppress(sl.LockLost):
        block.__exit__(None, None, None)
    assert bool(checkers.exclusion(story.history)) is not known


def test_try_that_waits(story: Story, watch: Callable[[str], Watch]) -> None:
    key, (a, b) = sl.lock.key(unused()), (story.client() for _ in range(2))

    def attempt() -> None:
        with story.recorder.call("b", "try", "key", **{"try": True}) as answer:
            answer.value = broken.PublishedLock.try_exclusive(b, key)

    broken.PublishedLock.exclusive(a, key)
    trying = later(attempt)
    watch(SERVER).until_waiting(trying)
    a.commit()
    trying.result(PATIENCE)
    assert checkers.bounded_tries(story.history, patience=0)


def test_keys_that_share_a_bucket(story: Story) -> None:
    for client, key in (("a", 1), ("b", 2)):
        with story.recorder.call(client, "try", f"key {key}", acquires=True) as answer:
            answer.value = story.client().scalar(text("SELECT pg_try_advisory_xact_lock(7)"))
    assert checkers.independence(story.history)


def test_work_without_a_lock_is_lost(story: Story) -> None:
    key = story.room()
    ledger: list[Entry] = []
    number = story.client().scalar(text("SELECT used + 1 FROM broken_room WHERE name = :name"), {"name": key})
    for client in "ab":  # both have read the same
        with story.recorder.call(client, "work", key, writes=1) as answer:
            ledger.append(Entry(key, number, answer.call))
            answer.value = "committed"
    assert checkers.serial(story.history, ledger)


def test_naive_sum(story: Story, watch: Callable[[str], Watch]) -> None:
    """With FOR UPDATE, in REPEATABLE READ."""
    room = story.room()
    a, b = (story.client(isolation_level="REPEATABLE READ") for _ in range(2))
    assert broken.NaiveSum.acquire(a, room)
    second = later(broken.NaiveSum.acquire, b, room)
    watch(SERVER).until_waiting(second)
    for client, connection in (("a", a), ("b", b)):
        if client == "b":
            assert second.result(PATIENCE)
        broken.NaiveSum.insert(connection, room, client)
        connection.commit()
        story.recorder.hold(client, room, lasting=True)
    assert checkers.capacity(story.history, {room: 1})


def test_release_without_its_guard(story: Story) -> None:
    room, connection = story.room(), story.client()
    assert broken.Counter.acquire(connection, room)
    story.recorder.hold("a", room, lasting=True).leave()
    broken.Counter.release(connection, room)
    assert broken.Counter.acquire(connection, room)
    story.recorder.hold("b", room, lasting=True)
    broken.Counter.release(connection, room)  # again, because the reply was lost
    assert broken.Counter.acquire(connection, room)
    story.recorder.hold("c", room, lasting=True)
    assert checkers.capacity(story.history, {room: 1})


def test_token_of_a_cached_sequence(story: Story) -> None:
    with story.engine.begin() as connection:
        connection.execute(text("CREATE SEQUENCE IF NOT EXISTS broken_token CACHE 100"))
    for client, connection in [(client, story.client()) for client in "ab"] * 2:
        with story.recorder.call(client, "acquire", "room") as answer:
            fence = connection.scalar(text("SELECT nextval('broken_token')"))
        story.recorder.hold(client, "room", fence=fence, call=answer.call).leave()
    assert checkers.fences(story.history)


def test_request_that_is_used_again(story: Story) -> None:
    room, connection = story.room(), story.client()
    for _ in range(2):
        with story.recorder.call("a", "acquire", room, external_id=room) as answer:
            answer.value = "its row" if broken.Counter.acquire(connection, room) else None
        with story.recorder.call("a", "release", room, external_id=room) as answer:
            broken.Counter.release(connection, room)
            answer.value = "RELEASED"
    assert checkers.single_grants(story.history)


def test_uncommitted_acquisition(story: Story) -> None:
    task, connection = unused("mutex"), story.client()
    connection.execute(sl.Mutex().create(task))
    connection.commit()
    with story.recorder.call("a", "acquire", task) as answer:
        answer.value = connection.scalar(sl.Mutex().acquire(task))
        connection.rollback()
    held = {row.id for row in connection.execute(sl.Mutex().held(10_000))}
    assert checkers.survivors(story.history, {task: task in held})


def test_period_that_is_checked_first(story: Story) -> None:
    task = story.room()
    free = text("SELECT used = 0 FROM broken_room WHERE name = :name")
    answers = [bool(story.client().scalar(free, {"name": task})) for _ in "ab"]
    for client, was_free in zip("ab", answers, strict=True):
        with story.recorder.call(client, "once_per", task) as answer:
            answer.value = was_free
    assert checkers.periods(story.history)


def test_subquery_with_a_limit(story: Story) -> None:
    connection = story.client(isolation_level="AUTOCOMMIT")
    connection.execute(text("ALTER TABLE broken_job SET (autovacuum_enabled = off)"))
    connection.execute(text("INSERT INTO broken_job VALUES (0, 'ready', 0)"))
    connection.execute(text("ANALYZE broken_job"))  # the planner expects one row
    connection.execute(text("INSERT INTO broken_job SELECT n, 'ready', 0 FROM generate_series(1, 99) AS n"))
    with story.recorder.call("a", "capture", limit=3) as answer:
        answer.value = broken.SubqueryCapture.capture(connection, 3)
    assert checkers.captures(story.history)


def test_entities_that_are_loaded_first(story: Story) -> None:
    queue = unused("queue")
    with Session(story.engine) as session, session.begin():
        session.add(Task(id=queue, queue=queue))
    where = (Task.queue == queue, Task.status == "ready")
    with Session(story.engine) as a, Session(story.engine) as b:
        captured = [(each, broken.LoadedCapture.capture(each, Task, where)) for each in (a, b)]
        for client, (session, tasks) in zip("ab", captured, strict=True):
            session.commit()
            for task in tasks:
                story.recorder.hold(client, task.id, kind="row", lasting=True)
    assert checkers.captures(story.history)


def test_token_that_is_checked_before(story: Story) -> None:
    key, connection = unused("mutex"), story.client()
    here = Document.name == key
    with Session(story.engine) as session, session.begin():
        session.add(Document(name=key))
    assert broken.CheckedWrite.is_newest(connection, Document.fence, here, 1)
    connection.rollback()
    for client, token in (("b", 2), ("a", 1)):
        with story.recorder.call(client, "fenced", key, fence=token) as answer:
            answer.value = broken.CheckedWrite.write(connection, update(Document).where(here).values(fence=token))
            connection.commit()
    documents = {key: connection.scalars(select(Document.fence).where(here)).one()}
    assert checkers.fenced_writes(story.history, documents)


def test_permits_that_are_checked_before(story: Story) -> None:
    room, locks, connection = unused("room"), sl.Locks(story.engine), story.client()
    locks.run(sl.semaphore.create(room, 1))
    with Session(story.engine) as session, session.begin():
        session.add(Document(name=room))
    locks.acquire({room: 1}, external_id=room)
    requests = build_context(story.engine.dialect, {}).tables.permit_request
    assert broken.CheckedWrite.is_held(connection, requests, room)
    connection.rollback()
    with story.recorder.call("a", "release", room, external_id=room) as answer:
        answer.value = locks.release(room).value
    with story.recorder.call("a", "guarded", room, under=room) as answer:
        late = update(Document).where(Document.name == room).values(body="late")
        answer.value = broken.CheckedWrite.write(connection, late)
    assert checkers.guarded_writes(story.history)


def test_write_that_is_refused_for_nothing() -> None:
    history = History()
    recorder = Recorder(history.apply)
    with suppress(sl.StaleToken), recorder.call("a", "fenced", "1", fence=1):
        raise sl.StaleToken("no", 0)
    with suppress(sl.LockLost), recorder.call("a", "guarded", "1", under="1"):
        raise sl.LockLost("no")
    assert len(checkers.fenced_writes(history, {})) == 1
    assert len(checkers.guarded_writes(history)) == 1


def test_claim_that_counts(story: Story) -> None:
    a, b = story.client(), story.client()
    a.execute(text("INSERT INTO broken_job VALUES (1, 'ready', 0)"))
    a.commit()
    first = broken.CountingClaim.capture(a)
    assert first is not None
    a.rollback()
    assert broken.CountingClaim.capture(b)
    b.commit()
    story.recorder.hold("b", "the job", kind="job", lasting=True)
    broken.CountingClaim.fail(a, first)  # its "except:"
    a.commit()
    assert broken.CountingClaim.capture(b)
    story.recorder.hold("c", "the job", kind="job", lasting=True)
    assert checkers.jobs(story.history, [])


def test_worker_that_is_never_lost(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, mail = sl.Queue(), unused("queue")
    (ident,) = put(story.engine, {}, queue=mail)
    monkeypatch.setattr(RunningJob, "lost", False)

    def handle(job: Any) -> None:
        hold = story.recorder.hold("a", str(ident), kind="job")
        table = build_context(story.engine.dialect, {}).tables.job
        with story.engine.begin() as connection:
            silenced(connection, job)
            connection.scalar(queue.requeue_stalled(3600, queue=mail))
            connection.execute(update(table).where(table.c.external_id == ident).values(run_at=table.c.created_at))
            assert connection.execute(queue.capture(1, queue=mail, host="b")).all()
        second = story.recorder.hold("b", str(ident), kind="job")
        hold.sample(lambda: job.lost)
        second.leave()

    worker = sl.Worker(queue, handle, bind=story.engine, name=mail, concurrency=1, heartbeat=0.05, poll=0.05)
    worker.run(until_empty=True)
    assert checkers.jobs(story.history, [])


def test_job_that_two_workers_have_done() -> None:
    history = History()
    for client in "ab":
        with Recorder(history.apply, client).call(client, "handle", "1", once=True) as answer:
            answer.value = "done"
    assert checkers.jobs(history, [Job("1", "completed")])


def test_job_that_is_removed_before_it_runs() -> None:
    history = History()
    recorder = Recorder(history.apply)
    with recorder.call("a", "put", "1") as answer:
        answer.value = "committed"
    with recorder.call("b", "complete", "2") as answer:
        answer.value = 1
    states = [Job("2", "running"), Job("3", "completed")]
    assert sorted(violation.what for violation in checkers.jobs(history, states)) == [
        "'1' was put, and is lost",
        "'2' is acknowledged as completed, and is running",
        "'2' is running after all queues were worked off",
        "'3' is completed, and nobody did it",
    ]


def test_raw_driver_error_is_not_named(story: Story) -> None:
    with pytest.raises(sl.UnknownSemaphore), story.recorder.call("a", "acquire"):
        sl.Locks(story.engine).acquire({unused(): 1})
    assert checkers.named_errors(story.history) == []
    with pytest.raises(Exception, match="no_such_table"), story.recorder.call("a", "acquire"):
        story.client().execute(text("SELECT 1 FROM no_such_table"))
    assert len(checkers.named_errors(story.history)) == 1

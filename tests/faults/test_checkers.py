"""Each checker finds the bug of a known-broken version, and finds nothing where this library does the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, String, Table, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.workers.running_job import RunningJob
from tests.faults import broken, checkers
from tests.faults.checkers import Entry, Job
from tests.faults.history import History, Recorder
from tests.faults.tables import Document, Task, metadata
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, later, until, unused
from tests.fixtures.queues import put, silenced

OURS = pytest.mark.parametrize("ours", [False, True], ids=["broken", "ours"])
BOTH = pytest.mark.parametrize("name", ["postgresql15", "sqlite"])
HOUR = 3600
JOBS = Table("broken_job", MetaData(), Column("id", Integer, primary_key=True), Column("status", String(20)))


class Story:
    """Clients with a connection each, on an engine with the broken tables, and their history."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.history = History()
        self.recorder = Recorder(self.history.apply)
        self._stack = ExitStack()
        with engine.begin() as connection:
            broken.install(connection)
            metadata.create_all(connection)
            connection.execute(text("DELETE FROM broken_job"))

    def client(self, **options: Any) -> Connection:
        return self._stack.enter_context(self.engine.connect().execution_options(**options))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def story(engine_to: MakeEngine) -> Iterator[Callable[..., Story]]:
    told: list[Story] = []

    def make(name: str, **options: Any) -> Story:
        told.append(Story(engine_to(name, **options)))
        return told[-1]

    yield make
    for each in told:
        each.close()


def found(violations: list[checkers.Violation], ours: bool) -> None:
    """The library's history has no violation, and the broken one's has."""
    assert violations == [] if ours else violations, violations


class TestLock:
    @OURS
    @pytest.mark.parametrize("deletes", ["unlock", "vacuum"])
    def test_deleted_key_has_two_holders(
        self, story: Callable[..., Story], watch: Callable[[str], Watch], deletes: str, ours: bool
    ) -> None:
        tale, waiters = story("postgresql15-table"), watch("postgresql15-table")
        key = sl.lock.key(unused())
        a, b, c = (tale.client() for _ in range(3))

        def acquire(connection: Connection) -> None:
            connection.execute(sl.lock.exclusive(key)) if ours else broken.PublishedLock.exclusive(connection, key)

        acquire(a)
        a.commit()  # the key's row is there
        acquire(a)
        second = later(acquire, b)
        waiters.until_waiting(second)
        if deletes == "vacuum" and ours:
            vacuum = later(lambda: tale.client(isolation_level="AUTOCOMMIT").execute(sl.lock.vacuum()))
            vacuum.result(PATIENCE)
        elif ours:
            a.execute(sl.lock.unlock(key))
        else:  # the article's vacuum has locked the row before it deletes it
            broken.PublishedLock.unlock(a, key)
        a.commit()
        second.result(PATIENCE)
        hold = tale.recorder.hold("b", "key")
        third = later(acquire, c)
        until(lambda: third.done() or waiters.waiting())
        if third.done():
            tale.recorder.hold("c", "key").leave()
        hold.leave()
        b.commit()
        third.result(PATIENCE)
        found(checkers.exclusion(tale.history), ours)

    @pytest.mark.parametrize("known", [False, True], ids=["fault unknown", "fault known"])
    def test_answer_that_is_read_after_its_connection_died(
        self, story: Callable[..., Story], watch: Callable[[str], Watch], engine_to: MakeEngine, known: bool
    ) -> None:
        tale, server, key = story("postgresql15"), watch("postgresql15"), unused()
        block = sl.Locks(tale.engine).exclusive(key)
        with tale.recorder.call("a", "block", key) as entered:
            held = block.__enter__()
        with tale.recorder.fault("terminate") if known else ExitStack():
            server.kill(server.backend(held.session.connection()))
        with sl.Locks(engine_to("postgresql15")).exclusive(key, timeout=PATIENCE):
            second = tale.recorder.hold("b", key)
            tale.recorder.hold("a", key, call=entered.call)  # as if the client had been slow to read the answer
            second.leave()
        with suppress(sl.LockLost):
            block.__exit__(None, None, None)
        found(checkers.exclusion(tale.history), ours=known)

    @OURS
    def test_try_that_waits(self, story: Callable[..., Story], watch: Callable[[str], Watch], ours: bool) -> None:
        tale, waiters = story("postgresql15-table"), watch("postgresql15-table")
        key, (a, b) = sl.lock.key(unused()), (tale.client() for _ in range(2))

        def attempt() -> None:
            with tale.recorder.call("b", "try", "key", **{"try": True}) as answer:
                tries = sl.lock.try_exclusive(key)
                answer.value = b.scalar(tries) if ours else broken.PublishedLock.try_exclusive(b, key)

        a.execute(sl.lock.exclusive(key)) if ours else broken.PublishedLock.exclusive(a, key)
        trying = later(attempt)
        if ours:
            trying.result(PATIENCE)
        else:
            waiters.until_waiting(trying)
            time.sleep(0.01)
        a.commit()
        trying.result(PATIENCE)
        found(checkers.bounded_tries(tale.history, checkers.PATIENT if ours else 10**7), ours)

    @OURS
    def test_keys_that_share_a_bucket(self, story: Callable[..., Story], ours: bool) -> None:
        tale = story("postgresql15")
        a, b = (tale.client() for _ in range(2))
        for client, connection, key in (("a", a, 1), ("b", b, 2)):
            with tale.recorder.call(client, "try", f"key {key}", acquires=True) as answer:
                tries = sl.lock.try_exclusive(unused()) if ours else text("SELECT pg_try_advisory_xact_lock(7)")
                answer.value = connection.scalar(tries)
        found(checkers.independence(tale.history), ours)

    @OURS
    @BOTH
    def test_work_without_a_lock_is_lost(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, key = story(name), unused()
        with tale.client() as connection, connection.begin():
            connection.execute(text("INSERT INTO broken_room VALUES (:name, 0, 0)"), {"name": key})
        ledger: list[Entry] = []

        def work(client: str, connection: Connection, meanwhile: Callable[[], object]) -> None:
            with tale.recorder.call(client, "work", key, writes=1) as answer:
                if ours:
                    connection.execute(sl.lock.exclusive(key))
                number = connection.scalar(text("SELECT used FROM broken_room WHERE name = :name"), {"name": key}) + 1
                meanwhile()
                values = {"name": key, "used": number}
                connection.execute(text("UPDATE broken_room SET used = :used WHERE name = :name"), values)
                connection.commit()
                ledger.append(Entry(key, number, answer.call))
                answer.value = "committed"

        others: list[Future[None]] = []

        def interrupt() -> None:
            others.append(later(work, "b", tale.client(), lambda: None))
            if not ours:
                others[0].result(PATIENCE)

        work("a", tale.client(), interrupt)
        others[0].result(PATIENCE)
        found(checkers.serial(tale.history, ledger), ours)


class TestSemaphore:
    @OURS
    @BOTH
    def test_naive_sum(self, story: Callable[..., Story], watch: Callable[[str], Watch], name: str, ours: bool) -> None:
        """On PostgreSQL with FOR UPDATE, in REPEATABLE READ; on SQLite in the driver's own transactions."""
        options = {"isolation_level": "REPEATABLE READ"} if name == "postgresql15" else {}
        tale, room = story(name, **options), unused("room")
        with tale.engine.begin() as connection:
            connection.execute(sl.semaphore.create(room, 1))
            connection.execute(text("INSERT INTO broken_room VALUES (:name, 1, 0)"), {"name": room})
        a, b = (tale.client() for _ in range(2))

        def acquire(connection: Connection) -> bool:
            if ours:
                return bool(connection.scalar(sl.semaphore.acquire({room: 1})))
            return broken.NaiveSum.acquire(connection, room, "?", locks=name != "sqlite")

        def grant(client: str, connection: Connection) -> None:
            if not ours:
                broken.NaiveSum.insert(connection, room, client)
            connection.commit()
            tale.recorder.hold(client, room, lasting=True)

        assert acquire(a)
        second = later(acquire, b)
        if name == "sqlite" and not ours:
            assert second.result(PATIENCE)
        else:
            watch(name).until_waiting(second)
        grant("a", a)
        try:
            if second.result(PATIENCE):
                grant("b", b)
        except OperationalError:  # could not serialize
            assert ours
        found(checkers.capacity(tale.history, {room: 1}), ours)

    @OURS
    @BOTH
    def test_release_without_its_guard(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, room = story(name), unused("room")
        locks = sl.Locks(tale.engine)
        locks.run(sl.semaphore.create(room, 1))
        with tale.engine.begin() as connection:
            connection.execute(text("INSERT INTO broken_room VALUES (:name, 1, 0)"), {"name": room})

        def acquire(client: str) -> Any:
            with tale.engine.begin() as connection:
                got = (
                    connection.scalar(sl.semaphore.acquire({room: 1}))
                    if ours
                    else broken.Counter.acquire(connection, room)
                )
            return (got, tale.recorder.hold(client, room, lasting=True)) if got else (got, None)

        def release(grant: Any) -> None:
            with tale.engine.begin() as connection:
                connection.scalar(sl.semaphore.release(grant)) if ours else broken.Counter.release(connection, room)

        first, hold = acquire("a")
        hold.leave()
        release(first)
        assert acquire("b")[0]
        release(first)  # again, because the reply was lost
        acquire("c")
        found(checkers.capacity(tale.history, {room: 1}), ours)

    @OURS
    def test_token_of_a_cached_sequence(self, story: Callable[..., Story], ours: bool) -> None:
        tale, room = story("postgresql15"), unused("room")
        with tale.engine.begin() as connection:
            connection.execute(sl.semaphore.create(room, 1))
            connection.execute(text("CREATE SEQUENCE IF NOT EXISTS broken_token CACHE 100"))
        for client, connection in [(client, tale.client()) for client in "ab"] * 2:
            with tale.recorder.call(client, "acquire", room) as answer:
                if ours:
                    grant = connection.scalar(sl.semaphore.acquire({room: 1}))
                    fence = grant.fence[room]
                    connection.scalar(sl.semaphore.release(grant))
                else:
                    fence = connection.scalar(text("SELECT nextval('broken_token')"))
                connection.commit()
            tale.recorder.hold(client, room, fence=fence, call=answer.call).leave()
        found(checkers.fences(tale.history), ours)

    @OURS
    @BOTH
    def test_request_that_is_used_again(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, room = story(name), unused("room")
        locks = sl.Locks(tale.engine)
        locks.run(sl.semaphore.create(room, 1))
        with tale.engine.begin() as connection:
            connection.execute(text("INSERT INTO broken_room VALUES (:name, 1, 0)"), {"name": room})
        for _ in range(2):
            with (
                tale.recorder.call("a", "acquire", room, external_id=room) as answer,
                tale.engine.begin() as connection,
            ):
                if ours:
                    grant = connection.scalar(sl.semaphore.acquire({room: 1}, external_id=room))
                    answer.value = grant.token if grant else None
                else:
                    answer.value = "its row" if broken.Counter.acquire(connection, room) else None
            with (
                tale.recorder.call("a", "release", room, external_id=room) as answer,
                tale.engine.begin() as connection,
            ):
                if ours:
                    answer.value = connection.scalar(sl.semaphore.release(room)).value
                else:
                    broken.Counter.release(connection, room)
                    answer.value = "RELEASED"
        found(checkers.single_grants(tale.history), ours)


class TestConditional:
    @OURS
    @BOTH
    def test_uncommitted_acquisition(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, task = story(name), unused("mutex")
        with tale.engine.begin() as connection:
            connection.execute(sl.Mutex().create(task))
        with tale.recorder.call("a", "acquire", task) as answer:
            if ours:
                answer.value = sl.Locks(tale.engine).mutex.acquire(task)
            else:
                with tale.engine.connect() as connection:
                    answer.value = connection.scalar(sl.Mutex().acquire(task))
                    connection.rollback()
        with tale.engine.connect() as connection:
            held = {row.id for row in connection.execute(sl.Mutex().held(10_000))}
        found(checkers.survivors(tale.history, {task: task in held}), ours)

    @OURS
    @BOTH
    def test_period_that_is_checked_first(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, task = story(name), unused("period")
        with tale.engine.begin() as connection:
            connection.execute(text("INSERT INTO broken_room VALUES (:name, 0, 0)"), {"name": task})
        free = text("SELECT used = 0 FROM broken_room WHERE name = :name")
        seen = []
        for _ in "ab":
            with tale.engine.connect() as connection:
                seen.append(bool(connection.scalar(free, {"name": task})))
        for client, was_free in zip("ab", seen, strict=True):
            with tale.recorder.call(client, "once_per", task) as answer, tale.engine.begin() as connection:
                connection.execute(text("UPDATE broken_room SET used = 1 WHERE name = :name"), {"name": task})
                answer.value = was_free
            if ours:
                answer.value = None
                with tale.recorder.call(client, "once_per", task) as answer:
                    answer.value = sl.Locks(tale.engine).once_per(task, every=100 * 86400)
        if ours:
            calls = [call for call in tale.history.calls.values() if call.number.endswith(("2", "4"))]
            tale.history.calls = {call.number: call for call in calls}
        found(checkers.periods(tale.history), ours)


class TestCapture:
    @OURS
    def test_subquery_with_a_limit(self, story: Callable[..., Story], ours: bool) -> None:
        tale = story("postgresql15")
        with tale.engine.begin() as connection:
            connection.execute(text("ALTER TABLE broken_job SET (autovacuum_enabled = off)"))
            connection.execute(text("INSERT INTO broken_job VALUES (0, 'ready', 0)"))
        with tale.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE broken_job"))  # the planner expects one row
            connection.execute(text("INSERT INTO broken_job SELECT n, 'ready', 0 FROM generate_series(1, 99) AS n"))
        with tale.engine.begin() as connection, tale.recorder.call("a", "capture", limit=3) as answer:
            if ours:
                taken = sl.capture(
                    JOBS, where=JOBS.c.status == "ready", values={"status": "captured"}, order_by=JOBS.c.id, limit=3
                )
                answer.value = [row.id for row in connection.execute(taken).all()]
            else:
                answer.value = broken.SubqueryCapture.capture(connection, 3)
        found(checkers.captures(tale.history), ours)

    @OURS
    @BOTH
    def test_entities_that_are_loaded_first(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, queue = story(name), unused("queue")
        with Session(tale.engine) as session, session.begin():
            session.add(Task(id=queue, queue=queue))
        where = (Task.queue == queue, Task.status == "ready")

        def capture(session: Session) -> list[Task]:
            if ours:
                return list(session.scalars(sl.capture(Task, where=where, values={"status": "captured"})))
            return broken.LoadedCapture.capture(session, Task, where)

        with Session(tale.engine) as a, Session(tale.engine) as b:
            first = capture(a)
            if ours:
                a.commit()
            second = capture(b)
            for client, session, captured in (("a", a, first), ("b", b, second)):
                session.commit()
                for task in captured:
                    tale.recorder.hold(client, task.id, kind="row", lasting=True)
        found(checkers.captures(tale.history), ours)


class TestWrites:
    @OURS
    @BOTH
    def test_token_that_is_checked_before(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, key = story(name), unused("mutex")
        locks, here = sl.Locks(tale.engine), Document.name == key
        locks.run(sl.Mutex().create(key))
        with Session(tale.engine) as session, session.begin():
            session.add(Document(name=key))
        tokens = [(locks.mutex.acquire_token(key), locks.mutex.release(key))[0] for _ in "ab"]
        with tale.engine.connect() as connection:
            assert broken.CheckedWrite.is_newest(connection, Document.fence, here, tokens[0])
        for client, token in zip("ba", reversed(tokens), strict=True):
            with suppress(sl.StaleToken), tale.recorder.call(client, "fenced", key, fence=token) as answer:
                if ours:
                    answer.value = locks.run(sl.fenced(update(Document).where(here), Document.fence, token))
                else:
                    with tale.engine.begin() as connection:
                        written = update(Document).where(here).values(fence=token)
                        answer.value = broken.CheckedWrite.write(connection, written)
        with Session(tale.engine) as session:
            documents = {key: session.scalars(select(Document.fence).where(here)).one()}
        found(checkers.fenced_writes(tale.history, documents), ours)

    @OURS
    @BOTH
    def test_permits_that_are_checked_before(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, room = story(name), unused("room")
        locks = sl.Locks(tale.engine)
        locks.run(sl.semaphore.create(room, 1))
        with Session(tale.engine) as session, session.begin():
            session.add(Document(name=room))
        grant = locks.acquire({room: 1}, external_id=room)
        requests = build_context(tale.engine.dialect, {}).tables.permit_request
        with tale.engine.connect() as connection:
            assert broken.CheckedWrite.is_held(connection, requests, room)
        with tale.recorder.call("a", "release", room, external_id=room) as answer:
            answer.value = locks.release(room).value
        late = update(Document).where(Document.name == room).values(body="late")
        with suppress(sl.LockLost), tale.recorder.call("a", "guarded", room, under=room) as answer:
            if ours:
                answer.value = locks.run(sl.guarded(late, grant))
            else:
                with tale.engine.begin() as connection:
                    answer.value = broken.CheckedWrite.write(connection, late)
        found(checkers.guarded_writes(tale.history), ours)

    def test_write_that_is_refused_for_nothing(self) -> None:
        history = History()
        recorder = Recorder(history.apply)
        with suppress(sl.StaleToken), recorder.call("a", "fenced", "1", fence=1):
            raise sl.StaleToken("no", 0)
        with suppress(sl.LockLost), recorder.call("a", "guarded", "1", under="1"):
            raise sl.LockLost("no")
        assert len(checkers.fenced_writes(history, {})) == 1
        assert len(checkers.guarded_writes(history)) == 1


class TestQueue:
    @OURS
    @BOTH
    def test_claim_that_counts(self, story: Callable[..., Story], name: str, ours: bool) -> None:
        tale, queue, mail = story(name), sl.Queue(), unused("queue")
        put(tale.engine, {}, queue=mail)
        with tale.engine.begin() as connection:
            connection.execute(text("INSERT INTO broken_job VALUES (1, 'ready', 0)"))

        def capture(connection: Connection) -> Any:
            if ours:
                return connection.execute(queue.capture(1, queue=mail, host="h")).first()
            return broken.CountingClaim.capture(connection)

        with tale.engine.connect() as a:
            first = capture(a)
            a.rollback()
        with tale.engine.begin() as b:
            assert capture(b)
        tale.recorder.hold("b", "the job", kind="job", lasting=True)
        with tale.engine.begin() as a:  # its "except:"
            a.scalar(queue.fail(first, error="rolled back", retry_in=0)) if ours else broken.CountingClaim.fail(
                a, first
            )
        with tale.engine.begin() as c:
            third = capture(c)
        if third:
            tale.recorder.hold("c", "the job", kind="job", lasting=True)
        found(checkers.jobs(tale.history, []), ours)

    @OURS
    @BOTH
    def test_worker_that_is_never_lost(
        self, story: Callable[..., Story], monkeypatch: pytest.MonkeyPatch, name: str, ours: bool
    ) -> None:
        tale, queue, mail = story(name), sl.Queue(), unused("queue")
        (ident,) = put(tale.engine, {}, queue=mail)
        table = build_context(tale.engine.dialect, {}).tables.job
        if not ours:
            monkeypatch.setattr(RunningJob, "lost", False)

        def handle(job: Any) -> None:
            hold = tale.recorder.hold("a", str(ident), kind="job")
            with tale.engine.begin() as connection:
                silenced(connection, job)
                connection.scalar(queue.requeue_stalled(HOUR, queue=mail))
                connection.execute(update(table).where(table.c.external_id == ident).values(run_at=table.c.created_at))
            with tale.engine.begin() as connection:
                assert connection.execute(queue.capture(1, queue=mail, host="b")).all()
            second = tale.recorder.hold("b", str(ident), kind="job")
            if ours:
                until(lambda: job.lost)
            hold.sample(lambda: job.lost)
            second.leave()

        sl.Worker(queue, handle, bind=tale.engine, name=mail, concurrency=1, heartbeat=0.05, poll=0.05).run(
            until_empty=True
        )
        found(checkers.jobs(tale.history, []), ours)

    def test_job_that_two_workers_have_done(self) -> None:
        history = History()
        for client in "ab":
            with Recorder(history.apply, client).call(client, "handle", "1", once=True) as answer:
                answer.value = "done"
        assert checkers.jobs(history, [Job("1", "completed")])

    def test_job_that_is_removed_before_it_runs(self) -> None:
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


def test_raw_driver_error_is_not_named(engine_to: MakeEngine) -> None:
    history = History()
    recorder = Recorder(history.apply)
    engine = engine_to("sqlite")
    with pytest.raises(sl.UnknownSemaphore), recorder.call("a", "acquire"):
        sl.Locks(engine).acquire({unused(): 1})
    assert checkers.named_errors(history) == []
    with engine.connect() as connection, pytest.raises(OperationalError), recorder.call("a", "acquire"):
        connection.execute(text("SELECT 1 FROM no_such_table"))
    assert len(checkers.named_errors(history)) == 1

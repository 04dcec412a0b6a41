"""What a worker asks each time, one thing said and another asked for at once; what becomes of an answer that is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, event, select, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.captures.query_plan import _as_text, search_statement
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.queue.fetch import Fetched
from sqlalchemy_locks.workers.database import transaction
from sqlalchemy_locks.workers.fetch_cursor import FetchCursor
from sqlalchemy_locks.workers.state import WorkerState
from tests.conditional.test_lost_replies import final, in_the_clear
from tests.faults.drivers import sync
from tests.fixtures.parties import connected, installed
from tests.fixtures.queues import MakeEngine, empty, silenced
from tests.workers.test_workers import counts, put

queue = sl.Queue()


def exchanged(engine: Engine, done: Any, limit: int, *, host: str = "web-1", after: Any = None) -> Fetched:
    with transaction(engine) as short:
        told = short.connection.scalar(queue._exchange(done, limit, queue="default", host=host, after=after))
        assert isinstance(told, Fetched)
        return told


def test_the_same_answer_everywhere(engine: Engine) -> None:
    put(engine, *range(5))
    first = exchanged(engine, [], 2)
    assert ([job.payload for job in first.jobs], first.ended) == ([0, 1], 0)
    assert {(len(job), job.claim, job.processing_host) for job in first.jobs} == {(16, 1, "web-1")}
    second = exchanged(engine, first.jobs, 10)
    assert ([job.payload for job in second.jobs], second.ended) == ([2, 3, 4], 2)
    with engine.begin() as connection:
        silenced(connection, second.jobs[0])
        connection.execute(queue.requeue_stalled(3600))
        connection.execute(queue.release(second.jobs[2]))
    # two are somebody else's now, or nobody's
    third = exchanged(engine, second.jobs, 1)
    assert (len(third.jobs), third.ended) == (1, 1)
    assert third.jobs[0].claim == 2
    assert exchanged(engine, third.jobs, 10).ended == 1
    assert counts(engine)["completed"] == 4
    fourth = exchanged(engine, [], 10)
    assert fourth == ([], 0)


def test_both_or_neither(engine: Engine) -> None:
    put(engine, *range(4))
    mine = exchanged(engine, [], 2).jobs
    with pytest.raises(RuntimeError), transaction(engine) as short:
        told = short.connection.scalar(queue._exchange(mine, 2, queue="default", host="h", after=None))
        assert (len(told.jobs), told.ended) == (2, 2)
        raise RuntimeError
    assert counts(engine) == {"all": 4, "completed": 0, "dead": 0, "running": 2, "waiting": 2}


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_one_statement_for_each_batch(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    put(engine, *range(30))
    shift = shift_of(engine)
    shift.turn()
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    for _round in range(3):
        while (job := shift.take()) is not None:
            shift.done(job, None)
        shift.turn()
    assert len(statements) == 3
    assert counts(engine)["completed"] == 30


def test_a_class_of_ones_own(engine_to: MakeEngine) -> None:
    """Whose columns have other names: the place to go on from is found in its rows, too."""
    from tests.queue.test_own import Task, tasks  # the names are others there

    engine = engine_to("postgresql15")
    Task.metadata.drop_all(engine)
    Task.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(tasks.put(1, 2, 3, queue="q"))
    shift = WorkerState(
        sl.Worker(tasks, print, bind=engine, name="q", batch=2, heartbeat=3600, stalled_after=None), time.sleep
    )
    shift.turn()
    assert shift._head._after is not None
    assert len(shift.waiting) == 2
    Task.metadata.drop_all(engine)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_what_the_driver_gives_is_what_sqlalchemy_gives(engine_to: MakeEngine, driver: str) -> None:
    """Workers read jobs by the driver's own cursor, unless somebody listens to what it executes."""
    engine, watched = engine_to("postgresql15", driver), engine_to("postgresql15", driver)
    payloads = [
        None,
        0,
        1.5,
        "",
        'a "quoted" {text}, \\ and a comma',
        [],
        {},
        {"a": [{"b": None}], "c": "\u20ac"},
        [[1], 2],
    ]
    put(engine, *payloads, run_in=0.0)
    event.listen(watched, "before_cursor_execute", lambda *_: None)
    given = []
    for each in (engine, watched):
        with transaction(each) as short:
            jobs = short.connection.scalar(queue._exchange([], 20, queue="default", host="h", after=None)).jobs
            connection = short.connection
            connection.execute(queue.release(jobs))
            given.append(jobs)
    mine, theirs = given
    assert [job.payload for job in mine] == payloads
    fixed = [name for name in mine[0]._fields if name not in ("claim", "started_at", "heartbeat_at")]
    for job, other in zip(mine, theirs, strict=True):
        assert job._fields == other._fields
        assert [type(value) for value in job] == [type(value) for value in other]
        assert [getattr(job, name) for name in fixed] == [getattr(other, name) for name in fixed]


def test_payloads_are_read_as_the_engine_was_told_to(engine_to: MakeEngine) -> None:
    def loads(text: str) -> Any:
        return json.loads(text, parse_float=str)

    engine = engine_to("postgresql15", json_deserializer=loads)
    put(engine, {"price": 1.10}, [2.50])
    assert [job.payload for job in exchanged(engine, [], 2).jobs] == [{"price": "1.1"}, ["2.5"]]


@pytest.mark.parametrize("batch", [1, 10, 100])
def test_one_plan_serves_all_batches_and_looks_up_what_it_has_the_keys_of(engine_to: MakeEngine, batch: int) -> None:
    """Though the statistics are of a moment at which no job ran: a plan for any values is as good as one for these."""
    engine = engine_to("postgresql15", pool_size=1, max_overflow=0)
    put(engine, *range(3000))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE lock.job"))
    shift = shift_of(engine, batch=batch, concurrency=batch)
    # looks from the head
    shift._head._worthwhile = False
    for _ in range(15):
        shift.turn()
        assert len(work(shift)) == batch
    with engine.connect() as connection:
        prepared = text("SELECT name, generic_plans FROM pg_prepared_statements WHERE statement ~ 'locks_told'")
        ((name, generic),) = connection.execute(prepared).all()
        assert generic > 0
        plan = connection.exec_driver_sql(f"EXPLAIN EXECUTE {name} ('{{1}}', '{{1}}', 'default', 'h')").scalars().all()
    assert not [line for line in plan if "Seq Scan on job" in line]


# an answer that is lost


@pytest.fixture
def other(servers: Any, name: str) -> Iterator[Engine]:
    """An engine that leads to the server directly."""
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        empty(installed(servers, name))
        yield engine


def shift_of(engine: Engine, **terms: Any) -> WorkerState:
    # a heartbeat that is due, be it that the machine is slow, is a statement more, and keeps jobs from being begun
    terms = {"heartbeat": 3600, **terms}
    return WorkerState(sl.Worker(queue, print, bind=engine, stalled_after=None, **terms), time.sleep)


def work(shift: WorkerState) -> list[Any]:
    done = []
    while (job := shift.take()) is not None:
        done.append(job.payload)
        shift.done(job, None)
    return done


@sync
def test_an_answer_that_is_lost_loses_no_job(servers: Any, other: Engine, name: str, driver: str) -> None:
    put(other, *range(8), max_attempts=1)
    with in_the_clear(servers, name, driver) as (engine, proxy):
        shift = shift_of(engine, batch=2, host="same")
        shift.turn()
        done = work(shift)
        proxy.lose_answer(final(name))
        shift.turn()
        assert proxy.losses == 1
        while shift.waiting or counts(other)["waiting"]:
            done += work(shift)
            shift.turn()
        done += work(shift)
        shift.close()
    # each was done once, at its only attempt, those included whose capture nobody was told of
    assert sorted(done) == list(range(8))
    assert counts(other) == {"all": 8, "completed": 8, "dead": 0, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_only_its_own_jobs_are_regained(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name)
    put(engine, *range(6))
    mine, others = shift_of(engine, batch=2, host="same"), shift_of(engine, batch=2, host="same")
    mine.turn()
    others.turn()
    assert mine.take() is not None  # one runs
    lost = exchanged(engine, [], 1, host=mine.host).jobs
    mine._unsure = True
    mine.turn()
    assert [job.payload for job in mine.waiting] == [1, lost[0].payload]
    assert [job.payload for job in others.waiting] == [2, 3]
    for _ in range(2):
        mine.turn()
    assert len(mine.waiting) == 2


def test_a_worker_that_dies_before_it_reads_the_answer(engine: Engine) -> None:
    put(engine, *range(4))
    mine = exchanged(engine, [], 2).jobs
    exchanged(engine, mine, 2)  # and then it is gone
    assert counts(engine) == {"all": 4, "completed": 2, "dead": 0, "running": 2, "waiting": 0}
    with engine.begin() as connection:
        silenced(connection)
        assert connection.scalar(queue.requeue_stalled(0)) == 2
    heirs = exchanged(engine, [], 5).jobs
    assert [(job.payload, job.claim) for job in heirs] == [(2, 2), (3, 2)]
    # if it was only slow, what it says then changes nothing
    late = [(job.internal_id, 1) for job in heirs]
    assert exchanged(engine, late, 5) == ([], 0)
    assert exchanged(engine, heirs, 5) == ([], 2)


# where the next look begins


def test_a_dear_look_from_the_head_is_not_taken_each_time() -> None:
    head, last = FetchCursor(True, 3600), (0, None, 7)
    assert head.after() is None
    head.looked(None, last, 360)
    assert head.after() == last
    head.looked(last, (0, None, 9), 0.0)
    assert head.after() == (0, None, 9)
    head.looked(last, None, 0.0)  # there was nothing more: from the head
    assert head.after() is None
    head.looked(None, last, 0.0)
    assert head.after() is None
    capped = FetchCursor(True, 1)
    capped.looked(None, last, 360)
    assert capped._until <= time.monotonic() + 1
    cheap = FetchCursor(False, 3600)
    cheap.looked(None, last, 360)
    assert cheap.after() is None


def test_a_look_that_seems_dear_keeps_nobody_from_the_head_for_long(engine_to: MakeEngine) -> None:
    """It may have waited for a row of those that it ends, or for a connection."""
    shift = shift_of(engine_to("postgresql15"), heartbeat=3600)
    shift._head.looked(None, (0, None, 7), 360)
    assert shift._head._after is not None
    assert shift._head._until <= time.monotonic() + 1


@pytest.mark.parametrize(("name", "driver"), [("postgresql15", "psycopg"), ("postgresql15", "psycopg2")])
def test_a_look_that_was_asked_for_again_is_not_thought_dear(
    servers: Any, other: Engine, name: str, driver: str
) -> None:
    put(other, *range(6))
    with in_the_clear(servers, name, driver) as (engine, proxy):
        shift = shift_of(engine, batch=2)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
        proxy.lose_answer(final(name), lambda: time.sleep(0.1))
        asked = time.monotonic()
        shift.turn()
        assert (proxy.losses, time.monotonic() - asked >= 0.1) == (1, True)
        assert shift._head.after() is None


def test_what_comes_before_that_place_is_not_forgotten(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    put(engine, *range(4))
    shift = shift_of(engine, batch=2, heartbeat=3600)
    shift.turn()
    assert work(shift) == [0, 1]
    shift._head._until = time.monotonic() + 3600  # as after a look that took long
    put(engine, "urgent", priority=-1)
    shift.turn()
    assert work(shift) == [2, 3]
    # nothing comes after that any more, so it looks from the head, and at once
    shift.turn()
    assert shift.pause() == 0
    shift.turn()
    assert work(shift) == ["urgent"]
    shift.turn()
    assert counts(engine)["completed"] == 5


def test_an_old_snapshot_does_not_make_looks_dearer(engine_to: MakeEngine) -> None:
    """What another session's old snapshot may still see stays in the index, and is passed by each look from the head."""
    engine = engine_to("postgresql15", isolation_level="REPEATABLE READ")
    with engine.connect() as old, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("TRUNCATE lock.job"))
        connection.execute(queue.put(*range(3000)))
        connection.execute(text("VACUUM ANALYZE lock.job"))
        old.execute(text("SELECT count(*) FROM lock.job")).scalar()
        told = Fetched([], 0)
        for _ in range(20):
            told = connection.scalar(queue._exchange(told.jobs, 100, queue="default", host="h", after=None))
        last = queue._jobs.position(told.jobs[-1])

        def read(after: Any) -> int:
            operation = queue._exchange([], 10, queue="default", host="h", after=after)
            body: Any = operation._body
            context = build_context(connection.dialect, {})
            statement = _as_text(search_statement(body, body.taken(context), context), operation, connection)
            (plan,) = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}").one()
            document = json.loads(plan) if isinstance(plan, str) else plan
            return int(searching(document[0]["Plan"]))

        assert read(None) > 2 * read(last)


def searching(node: Any) -> int:
    """The pages that the search has looked at."""
    if node.get("Subplan Name") == "CTE locks_chosen":
        return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])
    return sum(searching(below) for below in node.get("Plans", ()))


def test_what_ends_jobs_goes_by_their_primary_key(engine_to: MakeEngine) -> None:
    """By the statistics of a quiet moment no job runs, and the index of those that do looks like the cheapest."""
    engine = engine_to("postgresql15")
    put(engine, *range(3000))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE lock.job"))
        for operation in (
            queue.complete([(1, 1), (2, 1)]),
            queue.heartbeat([(1, 1), (2, 1)]),
            queue._exchange([(1, 1), (2, 1)], 10, queue="default", host="h", after=None),
        ):
            compiled: Any = operation.compile(engine, compile_kwargs={"render_postcompile": True})
            plan = connection.exec_driver_sql(f"EXPLAIN {compiled}", compiled.params).scalars().all()
            assert not [line for line in plan if "job_running" in line]
            assert [line for line in plan if "job_pkey" in line]


# what is put, and by whom


def test_an_operation_puts_other_jobs_each_time(engine: Engine) -> None:
    operation = queue.put("a", "b")
    with engine.begin() as connection:
        first = connection.scalars(operation).all()
        second = connection.scalars(operation).all()
    assert len({*first, *second}) == 4
    assert {each.version for each in first} == {4}
    assert counts(engine)["all"] == 4


@sync
def test_a_put_that_is_tried_again_puts_once(servers: Any, other: Engine, name: str, driver: str) -> None:
    with in_the_clear(servers, name, driver) as (engine, proxy):
        proxy.lose_answer(b"\x03COMMIT" if name in ("mysql", "mariadb") else b"INSERT")
        mine = sl.Locks(engine).run(queue.put("a"))
        assert proxy.losses == 1
    with other.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        assert connection.execute(select(job.c.external_id)).scalars().all() == [mine]


def test_a_timeout_written_by_hand_keeps_no_other_from_its_own(engine: Engine) -> None:
    tasks = sl.StateTransition()
    with engine.begin() as connection:
        connection.execute(tasks.create("endless", "never", "over", timeout=1))
        assert len(connection.execute(tasks.capture(3)).all()) == 3
        task = build_context(connection.dialect, {}).tables.task
        for id, seconds in (("endless", 2**62), ("never", -(2**62)), ("over", 0)):
            connection.execute(update(task).where(task.c.id == id).values(timeout=seconds))
        # before now, be the clock as coarse as it may
        connection.execute(update(task).values(updated_at=datetime(2020, 1, 1, tzinfo=timezone.utc)))
    with engine.begin() as connection:
        assert connection.scalar(tasks.expire()) == 2
        assert connection.scalar(select(task.c.status).where(task.c.id == "endless")) == "in_progress"

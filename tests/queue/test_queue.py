"""The queue's operations on every engine: put once, captured by one owner, ended only by its owner."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import uuid
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, NullPool, event, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import Now
from tests.fixtures.parties import PATIENCE, all_of, async_connected, snapshot_isolation
from tests.fixtures.queues import ASYNC, MakeEngine, put, silenced
from tests.fixtures.worker_states import counts, errors, queue


def job_table(connection: Any) -> Any:
    return build_context(connection.engine.dialect, {}).tables.job


def take(engine: Engine, limit: int = 1, name: str = "default") -> list[Any]:
    with engine.begin() as connection:
        return list(connection.execute(queue.capture(limit, queue=name, host="here")))


def scalar(engine: Engine, operation: Any) -> Any:
    with engine.begin() as connection:
        return connection.execute(operation).scalar()


def row(engine: Engine, job: Any) -> Any:
    with engine.connect() as connection:
        table = job_table(connection)
        return connection.execute(select(table).where(table.c.internal_id == job.internal_id)).one()


def stats(engine: Engine) -> dict[str, tuple[int, ...]]:
    with engine.connect() as connection:
        return {found.queue_id: tuple(found)[1:5] for found in connection.execute(queue.stats())}


PAYLOADS = [{"to": "ä€😀", "n": [1, 2.5, None]}, [1, "x"], "text", 7, True, None, {"key": "a'b\"c\\d%s:x"}, ""]


def test_payloads_are_returned_unchanged(engine: Engine) -> None:
    ids = put(engine, *PAYLOADS, queue="mail")
    jobs = take(engine, 20, "mail")
    assert [job.payload for job in jobs] == PAYLOADS
    assert [job.external_id for job in jobs] == ids
    assert {(job.attempts, job.processing_host, job.queue_id) for job in jobs} == {(1, "here", "mail")}
    assert take(engine, 20, "mail") == []


def test_a_batch_is_one_statement(engine: Engine) -> None:
    sent: list[str] = []
    put(engine, 0)
    event.listen(engine, "before_cursor_execute", lambda *seen: "INSERT" in seen[2] and sent.append(seen[2]))
    put(engine, *range(50))
    assert len(sent) == 1
    assert len(take(engine, 99)) == 51


def test_rollback_undoes_put_capture_and_complete(engine: Engine) -> None:
    with Session(engine) as session:
        session.execute(queue.put(1, 2))
        session.rollback()
    assert take(engine, 5) == []
    put(engine, 3)
    with Session(engine) as session:
        assert [job.payload for job in session.execute(queue.capture(5))] == [3]
        session.rollback()
    with engine.connect() as connection:
        assert [job.payload for job in connection.execute(queue.capture(5))] == [3]
        connection.rollback()
    (job,) = take(engine, 5)
    assert job.attempts == 1
    with Session(engine) as session:
        assert session.scalar(queue.complete(job)) == 1
        session.rollback()
    assert scalar(engine, queue.complete(job)) == 1


def test_an_existing_external_id_puts_no_job(engine: Engine) -> None:
    mine = uuid.uuid4()
    assert put(engine, "first", external_id=mine) == [mine]
    assert put(engine, "second", external_id=str(mine)) == [mine]
    (job,) = take(engine, 5)
    assert job.payload == "first"
    # while it runs, and when it is completed
    assert put(engine, "third", external_id=mine) == [mine]
    assert scalar(engine, queue.complete(job)) == 1
    other = uuid.uuid4()
    assert put(engine, "fourth", "fifth", external_id=[mine, other]) == [mine, other]
    assert [job.payload for job in take(engine, 5)] == ["fifth"]


def test_each_execution_puts_new_jobs(engine: Engine) -> None:
    operation = queue.put("a", "b")
    with engine.begin() as connection:
        first = connection.scalars(operation).all()
        second = connection.scalars(operation).all()
    assert len({*first, *second}) == 4
    assert {each.version for each in first} == {4}
    assert counts(engine)["all"] == 4


def put_again(engine: Engine, *payloads: Any, external_id: Any) -> Any:
    """Put jobs, and again where the transaction, which looks for their ids first, has met another's."""
    while True:
        try:
            return put(engine, *payloads, external_id=external_id)
        except sl.MustRollback:
            assert snapshot_isolation(engine)


def test_concurrent_puts_of_one_id_make_one_job(leveled: Engine) -> None:
    for round in range(5):
        mine, start = uuid4(), threading.Barrier(4, timeout=PATIENCE)

        def work(number: int, mine: UUID = mine, start: threading.Barrier = start) -> None:
            start.wait()
            put_again(leveled, number, external_id=mine)

        all_of(*(partial(work, number) for number in range(4)))
        assert len(take(leveled, 9)) == 1, round


def test_batches_with_the_same_ids_do_not_deadlock(leveled: Engine) -> None:
    """In opposite orders: the second waits for the first, not also the first for the second."""
    for _ in range(10):
        ids, start = [uuid4() for _ in range(30)], threading.Barrier(2, timeout=PATIENCE)

        def work(ids: list[UUID], start: threading.Barrier = start) -> None:
            start.wait()
            assert put_again(leveled, *map(str, ids), external_id=ids) == ids

        all_of(*(partial(work, batch) for batch in (ids, ids[::-1])))
        assert len(take(leveled, 99)) == 30


@pytest.mark.parametrize("name", ["mysql", "mariadb", "postgresql15"])
def test_put_of_a_known_id_ignores_its_row_lock(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    mine = uuid.uuid4()
    put(engine, 1, external_id=mine)
    with engine.begin() as worker:
        assert len(worker.execute(queue.capture()).all()) == 1  # and locks its row
        again = queue.put(2, external_id=mine).execution_options(locks_wait=1)
        assert scalar(engine, again) == mine


def test_capture_orders_by_priority_then_run_at(engine: Engine) -> None:
    put(engine, "b", "c")
    put(engine, "a", priority=-5)
    put(engine, "e", priority=2)
    put(engine, "d", priority=1)
    assert [job.payload for job in take(engine, 2)] == ["a", "b"]
    assert [job.payload for job in take(engine, 9)] == ["c", "d", "e"]


def test_captures_skip_each_others_jobs(leveled: Engine) -> None:
    put(leveled, *range(20))
    with leveled.connect() as first, leveled.connect() as second, leveled.connect() as third:
        assert [job.payload for job in first.execute(queue.capture(3))] == [0, 1, 2]
        assert [job.payload for job in second.execute(queue.capture(3))] == [3, 4, 5]
        assert len(third.execute(queue.capture(99)).all()) == 14
        second.commit()
        first.rollback()
        third.rollback()
    assert [job.payload for job in take(leveled, 4)] == [0, 1, 2, 6]


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_capture_locks_no_job_that_it_passes(engine_to: MakeEngine, name: str) -> None:
    engine = engine_to(name, isolation_level="READ COMMITTED")
    put(engine, *range(20), priority=-1, run_in=3600)
    (due,) = put(engine, "due")
    with engine.connect() as worker, engine.begin() as other:
        assert [job.external_id for job in worker.execute(queue.capture())] == [due]
        table = job_table(other)
        scheduled = select(table.c.internal_id).where(table.c.priority == -1).with_for_update(skip_locked=True)
        assert len(other.execute(scheduled).all()) == 20


def test_scheduled_jobs_are_not_captured(engine: Engine) -> None:
    now = datetime.now(timezone.utc)
    east = timezone(timedelta(hours=9))
    put(engine, "later", run_in=3600)
    put(engine, "later, too", run_at=(now + timedelta(hours=1)).astimezone(east))
    put(engine, "due", run_in=timedelta(0))
    put(engine, "overdue", run_at=(now - timedelta(hours=1)).astimezone(east))
    assert [job.payload for job in take(engine, 9)] == ["overdue", "due"]
    assert stats(engine) == {"default": (0, 2, 2, 0)}
    with engine.begin() as connection:
        table = job_table(connection)
        connection.execute(update(table).where(table.c.started_at.is_(None)).values(run_at=now - timedelta(minutes=1)))
    assert len(take(engine, 9)) == 2


def test_complete(engine: Engine) -> None:
    put(engine, *range(4))
    jobs = take(engine, 4)
    assert scalar(engine, queue.complete(jobs[0])) == 1
    assert scalar(engine, queue.complete(jobs)) == 3
    assert scalar(engine, queue.complete(jobs)) == 0
    assert scalar(engine, queue.complete([])) == 0
    done = row(engine, jobs[0])
    assert done.completed_at is not None
    assert stats(engine) == {}


def test_jobs_are_rows_pairs_or_iterables(engine: Engine) -> None:
    put(engine, *range(5))
    jobs = take(engine, 5)
    assert scalar(engine, queue.complete((jobs[1].internal_id, jobs[1].claim))) == 1
    assert scalar(engine, queue.complete([(job.internal_id, job.claim) for job in jobs[2:4]])) == 2
    assert scalar(engine, queue.complete(jobs[0])) == 1
    assert scalar(engine, queue.complete(job for job in jobs)) == 1
    with pytest.raises(TypeError, match="not a captured job"):
        queue.complete(["x"])


def test_a_former_owner_changes_nothing(engine: Engine) -> None:
    put(engine, "job")
    (lost,) = take(engine)
    with engine.begin() as connection:
        silenced(connection)
    assert scalar(engine, queue.requeue_stalled(0)) == 1
    operations = [
        queue.complete(lost),
        queue.fail(lost, error="x"),
        queue.fail(lost, error="x", retry=False),
        queue.fail(lost, error="x", retry_in=1),
        queue.release(lost),
    ]
    # while it waits, while it has another owner, and when it is completed
    assert [scalar(engine, operation) for operation in operations] == [0] * 5
    (mine,) = take(engine)
    assert (mine.internal_id, mine.attempts) == (lost.internal_id, 2)
    assert mine.claim != lost.claim
    assert [scalar(engine, operation) for operation in operations] == [0] * 5
    assert scalar(engine, queue.complete(mine)) == 1
    assert [scalar(engine, operation) for operation in operations] == [0] * 5
    assert row(engine, mine).error is None


def test_a_job_is_dead_after_max_attempts(engine: Engine) -> None:
    put(engine, "job", max_attempts=3)
    for attempt in (1, 2):
        (job,) = take(engine)
        assert job.attempts == attempt
        assert scalar(engine, queue.fail(job, error=f"no {attempt}", retry_in=0)) == 1
        assert row(engine, job).error == f"no {attempt}"
    (job,) = take(engine)
    assert scalar(engine, queue.fail(job, error="no 3", retry_in=0)) == 1
    dead = row(engine, job)
    assert dead.failed_at is not None
    assert (dead.error, dead.completed_at) == ("no 3", None)
    assert take(engine) == []
    assert stats(engine) == {"default": (0, 0, 0, 1)}


def test_the_pause_after_a_failure_doubles(engine: Engine) -> None:
    put(engine, "job", max_attempts=20)
    (job,) = take(engine)
    assert scalar(engine, queue.fail(job, error="x", retry_in=timedelta(minutes=20))) == 1
    assert row(engine, job).run_at > now(engine) + timedelta(minutes=10)
    assert take(engine) == []
    for attempts, expected in ((1, 5), (2, 10), (3, 20), (10, 2560), (11, 3600), (19, 3600)):
        with engine.begin() as connection:
            table = job_table(connection)
            connection.execute(update(table).values(attempts=attempts - 1, run_at=datetime(2020, 1, 1)))
        (job,) = take(engine)
        before = now(engine)
        assert scalar(engine, queue.fail(job, error="x")) == 1
        rest = timedelta(seconds=expected)
        assert before + rest <= row(engine, job).run_at <= now(engine) + rest


def now(engine: Engine) -> datetime:
    """Return the time by the server's clock."""
    with engine.connect() as connection:
        found: datetime = connection.execute(select(Now())).scalar_one()
        return found


@pytest.mark.parametrize("engine", ["mysql", "mariadb", "postgresql15"], indirect=True)
@pytest.mark.parametrize("letter", ["\udc80", "\0", "\U0001f512"], ids=ascii)
def test_errors_are_cut_after_they_are_escaped(engine: Engine, letter: str) -> None:
    put(engine, 1, max_attempts=1)
    with engine.begin() as connection:
        jobs = connection.execute(queue.capture()).all()
    with engine.begin() as connection:
        assert connection.scalar(queue.fail(jobs, error=letter * 20000 + "the end")) == 1
    (error,) = errors(engine)
    assert len(error) == 16000
    assert error.endswith("the end")


def test_release_does_not_count_the_attempt(engine: Engine) -> None:
    put(engine, "job", max_attempts=1)
    for _ in range(3):
        (job,) = take(engine)
        assert job.attempts == 1
        assert scalar(engine, queue.release(job)) == 1


def test_stalled_jobs_are_requeued(engine: Engine) -> None:
    put(engine, "a", "b", max_attempts=2)
    a, b = take(engine, 2)
    assert scalar(engine, queue.requeue_stalled(3600)) == 0
    with engine.begin() as connection:
        table = job_table(connection)
        hours_ago = datetime.now(timezone.utc) - timedelta(hours=2)
        connection.execute(update(table).values(started_at=hours_ago).where(table.c.internal_id == a.internal_id))
    assert scalar(engine, queue.requeue_stalled(3600)) == 1
    (again,) = take(engine, 5)
    assert (again.internal_id, again.attempts) == (a.internal_id, 2)
    # after the last attempt it is dead, and no longer of the worker whose handler may still run
    with engine.begin() as connection:
        silenced(connection)
    assert scalar(engine, queue.requeue_stalled(0)) == 2
    assert "stalled" in row(engine, again).error
    assert (row(engine, again).failed_at is None, row(engine, again).claim == again.claim) == (False, False)
    assert [job.internal_id for job in take(engine, 5)] == [b.internal_id]


def test_requeue_of_one_queue(engine: Engine) -> None:
    put(engine, 1, 2, queue="slow")
    put(engine, 3, queue="fast")
    take(engine, 2, "slow")
    take(engine, 1, "fast")
    with engine.begin() as connection:
        silenced(connection)
    assert scalar(engine, queue.requeue_stalled(0, queue="fast")) == 1
    assert scalar(engine, queue.requeue_stalled(0, queue="fast")) == 0
    assert scalar(engine, queue.requeue_stalled(0, queue="slow")) == 2
    with pytest.raises(ValueError, match="queue"):
        queue.requeue_stalled(0, queue="")


def test_requeue_skips_locked_rows(leveled: Engine) -> None:
    put(leveled, "a", "b")
    a, _ = take(leveled, 2)
    with leveled.connect() as working:
        assert working.execute(queue.complete(a)).scalar() == 1  # and locks its row
        assert sl.Locks(leveled).run(queue.requeue_stalled(0)) == 1
        working.rollback()


def test_requeue_limit(engine: Engine) -> None:
    put(engine, *range(7))
    take(engine, 7)
    with engine.begin() as connection:
        silenced(connection)
    swept = [scalar(engine, queue.requeue_stalled(0, limit=3)) for _ in range(4)]
    assert swept == [3, 3, 1, 0]


def test_finished_jobs_are_deleted(engine: Engine) -> None:
    put(engine, *range(6))
    jobs = take(engine, 5)
    assert scalar(engine, queue.complete(jobs[:3])) == 3
    assert scalar(engine, queue.fail(jobs[3], error="x", retry=False)) == 1
    assert scalar(engine, queue.delete_finished(3600)) == 0
    assert scalar(engine, queue.delete_finished(0, queue="other")) == 0
    assert scalar(engine, queue.delete_finished(0, queue="default", limit=1)) == 1
    assert [scalar(engine, queue.delete_finished(0, limit=1)) for _ in range(3)] == [1, 1, 0]
    assert stats(engine) == {"default": (1, 0, 1, 1)}
    assert scalar(engine, queue.delete_finished(0, dead=True)) == 1
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(job_table(connection))) == 2


def test_stats(engine: Engine) -> None:
    put(engine, 1, 2, 3, queue="a")
    put(engine, 1, queue="a", run_in=3600)
    put(engine, 1, 2, queue="b", max_attempts=1)
    take(engine, 1, "a")
    jobs = take(engine, 2, "b")
    scalar(engine, queue.fail(jobs[0], error="x"))
    assert stats(engine) == {"a": (2, 1, 1, 0), "b": (0, 0, 1, 1)}
    with engine.connect() as connection:
        a, b = connection.execute(queue.stats()).all()
    assert a.oldest is not None
    assert b.oldest is None


@pytest.mark.parametrize(("name", "driver"), ASYNC)
def test_async_sessions_and_async_locks(engine_to: MakeEngine, servers: Any, name: str, driver: str) -> None:
    engine_to(name)

    async def work() -> None:
        async with async_connected(servers.installed(name, driver), poolclass=NullPool) as engine:
            async with AsyncSession(engine) as session:
                mine = uuid.uuid4()
                assert await session.scalar(queue.put({"a": 1}, external_id=mine)) == mine
                assert await session.scalar(queue.put({"a": 2}, external_id=mine)) == mine
                await session.execute(queue.put(1, 2, 3, queue="b", run_in=0.0))
                await session.execute(queue.put(4, queue="b", run_at=datetime.now(timezone.utc)))
                await session.commit()
                (job,) = (await session.execute(queue.capture(5))).all()
                assert job.payload == {"a": 1}
                assert await session.scalar(queue.fail(job, error="x", retry_in=0)) == 1
                (job,) = (await session.execute(queue.capture(5))).all()
                assert await session.scalar(queue.release([job])) == 1
                await session.commit()
                assert await session.scalar(queue.requeue_stalled(0)) == 0
                jobs = (await session.execute(queue.capture(5, queue="b"))).all()
                assert await session.scalar(queue.complete(jobs)) == 4
                await session.commit()
                assert await session.scalar(queue.delete_finished(0)) == 4
                assert len((await session.execute(queue.stats())).all()) == 1
                id = await session.scalar(queue.put(1, unique="a"))
                assert await session.scalar(queue.put(1, unique="a")) == id
                assert await session.scalar(queue.cancel(id))
                assert await session.scalar(queue.put(1, unique="a")) != id
                await session.commit()
            locks = sl.AsyncLocks(engine)
            assert await locks.run(queue.put(5, external_id=mine)) == mine
            assert await locks.run(queue.complete([])) == 0

    asyncio.run(work())


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: queue.put(), ValueError, "at least one payload"),
        (lambda: queue.put(1, queue=""), ValueError, "must not be empty"),
        (lambda: queue.put(1, queue="a "), ValueError, "ends with a space"),
        (lambda: queue.put(1, queue="a" * 256), ValueError, "256 characters"),
        (lambda: queue.put(1, queue="a\0"), ValueError, "NUL"),
        (lambda: sl.Queue(bind="sqlite://"), TypeError, "bind is an Engine"),
        (lambda: queue.put(1, queue=3), TypeError, "a queue is a str"),
        (lambda: queue.put(1, external_id="no uuid"), ValueError, "uuid5"),
        (lambda: queue.put(1, external_id=7), TypeError, "not iterable|is a UUID"),
        (lambda: queue.put(1, 2, external_id=[uuid.uuid4()]), ValueError, "2 payloads need 2"),
        (lambda: queue.put(1, run_at=datetime(2030, 1, 1)), ValueError, "time zone"),
        (lambda: queue.put(1, run_at="tomorrow"), TypeError, "datetime"),
        (lambda: queue.put(1, run_in="5m"), TypeError, "seconds"),
        (lambda: queue.put(1, run_in=-1), ValueError, "at least 0"),
        (lambda: queue.put(1, run_in=1, run_at=datetime.now(timezone.utc)), ValueError, "not both"),
        (lambda: queue.put(1, priority=True), TypeError, "priority is an int"),
        (lambda: queue.put(1, priority=2**31), ValueError, "to 2147483647, not "),
        (lambda: queue.put(1, max_attempts=0), ValueError, "is from 1 to"),
        (lambda: queue.capture(0), ValueError, "is from 1 to"),
        (lambda: queue.capture(True), TypeError, "limit is an int"),
        (lambda: queue.capture(1, host=""), ValueError, "must not be empty"),
        (lambda: queue.fail((1, 1), error=ValueError("x")), TypeError, "error is a str"),
        (lambda: queue.fail((1, 1), error="x", retry_in="1"), TypeError, "seconds"),
        (lambda: queue.requeue_stalled("5m"), TypeError, "seconds"),
        (lambda: queue.delete_finished(-1), ValueError, "at least 0"),
        (lambda: queue.indexes(), ValueError, "of your own"),
        (
            lambda: queue.put(1, 2, external_id=[uuid.UUID(int=1), str(uuid.UUID(int=1))]),
            ValueError,
            "the same external_id",
        ),
        (lambda: queue.put(1, run_in=float("inf")), ValueError, "a hundred years"),
        (lambda: queue.put(1, run_in=1e12), ValueError, "a hundred years"),
        (lambda: queue.put(1, max_attempts=2**40), ValueError, "to 2147483647, not "),
        (lambda: queue.fail((1, 1), error="x", retry_in=1e12), ValueError, "a hundred years"),
        (lambda: queue.requeue_stalled(1e12), ValueError, "a hundred years"),
        (lambda: queue.delete_finished(float("inf")), ValueError, "a hundred years"),
        (lambda: queue.capture(2**70), ValueError, "to 2147483647, not "),
        (lambda: sl.sqlite.begin_immediate(None), TypeError, "takes an Engine"),
        (lambda: queue.complete(42), TypeError, "42 is not a captured job"),
        (lambda: queue.complete(None), TypeError, "None is not a captured job"),
        (lambda: queue.complete([42]), TypeError, "42 is not a captured job"),
    ],
)
def test_bad_input_is_refused_before_any_sql(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


def nested(levels: int) -> Any:
    """A list in a list, and so on."""
    payload: Any = 1
    for _ in range(levels):
        payload = [payload]
    return payload


@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("name", ["postgresql15", "mysql", "sqlite"])
def test_unstorable_payload_is_refused_before_any_sql(engine_to: MakeEngine, name: str, escaped: bool) -> None:
    engine = engine_to(name, json_serializer=lambda value: json.dumps(value, ensure_ascii=escaped))
    statements: list[str] = []
    with engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", lambda *given: statements.append(given[2]))
        for payload, error, message in (
            ("a\0", ValueError, "no NUL"),
            ({"\udcff": 1}, ValueError, "half of a surrogate pair"),
            (["é", "\ud800"], ValueError, "half of a surrogate pair"),
            ([float("nan")], ValueError, "a payload is JSON, and this isn't"),
            (-float("inf"), ValueError, "a payload is JSON, and this isn't"),
            ({"wei": 10**20 + 1}, ValueError, "an integer of a payload has at most 64 bits"),
            ([{"wei": [-(2**63) - 1]}], ValueError, "an integer of a payload has at most 64 bits"),
            (2**63, ValueError, "an integer of a payload has at most 64 bits"),
            (10**5000, ValueError, "64 bits|digits"),
            (nested(32), ValueError, "at most 31 levels"),
            (nested(100_000), ValueError, "at most 31 levels"),
            ({"é" * 40_000: 1}, ValueError, "a key of a payload has at most 65535 bytes"),
            ({"at": datetime.now(timezone.utc)}, TypeError, r"convert it, or pass json_serializer= to create_engine"),
        ):
            with pytest.raises(error, match=message):
                connection.execute(queue.put(payload, queue="unstorable"))
        assert not [each for each in statements if "lock.job" in each or "lock_job" in each]
    for payload in ("\\u0000 NaN", "Infinity", "\U0001f512 é"):
        put(engine, payload, queue="storable")
        [job] = sl.Locks(engine).run(queue.capture(1, queue="storable"))
        assert job.payload == payload


@pytest.mark.parametrize("number", ["1e400", "-1e-7777777", "0.123456789012345678", f"{10**20}.5"])
def test_numbers_that_only_a_serializer_of_the_apps_can_write(engine_to: MakeEngine, number: str) -> None:
    engine = engine_to("sqlite", json_serializer=lambda value: f'{{"wei": [{value}]}}')
    with pytest.raises(ValueError, match="a float of a payload has at most 64 bits"):
        put(engine, number)


@pytest.mark.parametrize("engine", ["postgresql15", "mysql", "mariadb", "sqlite"], indirect=True)
def test_what_put_accepts_is_returned_unchanged(engine: Engine) -> None:
    chance = random.Random(1)
    floats = [chance.uniform(-1, 1) * 10.0 ** chance.randint(-300, 300) for _ in range(300)]
    payloads = [
        [2**63 - 1, -(2**63), 0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1e16, 1e23, 1e-7, *floats],
        {"a 1e400": '"1e23" [[[{{{' * 20, "12345678901234567890": "10000000000000000000000", '"': "\\"},
        nested(31),
        2**63 - 1,
    ]
    for payload in payloads:
        put(engine, payload, queue="unchanged")
        [job] = sl.Locks(engine).run(queue.capture(1, queue="unchanged"))
        assert job.payload == payload
        if isinstance(payload, list):
            assert list(map(type, job.payload)) == list(map(type, payload))

"""What a heartbeat per worker must not lose, step by step: reclaims, lost replies, own tables, suspects."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, event, func, literal, select, update
from sqlalchemy.orm import DeclarativeBase

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.queue.liveness import SendHeartbeat
from sqlalchemy_locks.runtime.renewal import clock
from sqlalchemy_locks.sql.clock import Now, PlusSeconds, SecondsAgo
from tests.conftest import PLAIN, Servers
from tests.fixtures.forks import main
from tests.fixtures.parties import PATIENCE, later, until
from tests.fixtures.queues import KINDS, MakeEngine, put, silenced
from tests.fixtures.worker_states import (
    beat,
    begin_all,
    compare,
    counts,
    fetched,
    finish_all,
    queue,
    running,
    state_for,
    state_of,
    steady,
    sweep,
)

STORED: dict[str, Any] = {"heartbeat": 60, "stalled_after": 120}
#: where a capture counts attempts, too
POSTGRESQL = ("postgresql15", "postgresql18", "yugabytedb")


def silence(engine: Engine, state: Any) -> None:
    """Set the last heartbeat of one worker to an hour ago."""
    with engine.begin() as connection:
        worker = build_context(connection.dialect, {}).tables.worker
        silencing = update(worker).where(worker.c.host == state.heartbeats.host).values(heartbeat_at=SecondsAgo(3600.0))
        assert connection.execute(silencing).rowcount == 1


def hosts(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        worker = build_context(connection.dialect, {}).tables.worker
        return list(connection.execute(select(worker.c.host).order_by(worker.c.host)).scalars())


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_the_jobs_of_a_silent_worker_have_another_owner(engine: Engine) -> None:
    put(engine, *range(3))
    mine, other = state_of(engine, concurrency=2, **STORED), state_of(engine, **STORED)
    mine.cycle()
    run, _ = begin_all(mine)
    (unbegun,) = mine.waiting
    sweep(other)
    assert (counts(engine)["running"], run.lost) == (3, False)
    silence(engine, mine)
    sweep(other)
    assert hosts(engine) == [other.heartbeats.host]
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        attempts = dict(connection.execute(select(job.c.internal_id, job.c.attempts)).all())  # type: ignore[arg-type]
    # a job that was fetched and hadn't begun costs nothing
    assert Counter(attempts.values()) == {1: 2, 0: 1}
    assert attempts[unbegun.internal_id] == 0
    assert sorted(job.payload for job in fetched(engine, [], 9)) == [0, 1, 2]
    host = mine.heartbeats.host
    beat(mine)
    assert run.lost
    assert mine.heartbeats.host != host
    assert not (mine.waiting)
    assert not (mine.ready)
    assert mine.heartbeats.host in hosts(engine)
    mine.done(run, None)
    mine.cycle()
    assert counts(engine)["completed"] == 0, "a report of the former owner changes nothing"


@pytest.mark.parametrize("name", KINDS)
def test_an_attempt_counted_ahead_is_given_back(engine_to: MakeEngine, name: str) -> None:
    """Handlers are fast, and the worker dies: nobody knows which of them had begun."""
    engine = engine_to(name)
    put(engine, *range(4))
    put(engine, "last", max_attempts=1, priority=1)
    mine, other = state_of(engine, concurrency=1, **STORED), state_of(engine, concurrency=1, **STORED)
    mine._handler_time = 1e-6
    for _ in range(3):
        mine.cycle()
    assert len(mine.ready) == 4, "the last attempt of a job is counted when it begins"
    assert mine.take() is not None
    compare(mine)
    assert (len(mine.ready), counts(engine)["running"]) == (3, 5), "the claims are those in the database"

    def attempts() -> dict[str, int]:
        with engine.connect() as connection:
            job = build_context(connection.dialect, {}).tables.job
            rows: Any = connection.execute(select(job.c.payload, job.c.attempts)).all()
            return {str(payload): number for payload, number in rows}

    assert sorted(attempts().values()) == [0, 1, 1, 1, 1]
    mine.database.return_connection()
    silence(engine, mine)
    sweep(other)
    # elsewhere the first one is counted by itself, as its slot was free
    assert sorted(attempts().values()) == [0, 0, 0, 0, 0 if name in POSTGRESQL else 1]
    assert counts(engine) == {"all": 5, "completed": 0, "dead": 0, "running": 0, "waiting": 5}
    done: list[Any] = []
    while len(done) < 5:
        other.cycle()
        done += finish_all(other)
    assert done == [0, 1, 2, 3, "last"]
    other.close()


def test_a_search_continues_where_the_last_one_ended(engine_to: MakeEngine) -> None:
    """Jobs that sort before that position wait for the next search from the head, and none is lost."""
    engine = engine_to("postgresql15")
    put(engine, *range(5))
    state = state_of(engine, concurrency=2, prefetch=0)
    state.cycle()
    state._from_head_at = float("inf")  # as after a slow search
    assert finish_all(state) == [0, 1]
    put(engine, "urgent", priority=-1)
    state.cycle()
    assert finish_all(state) == [2, 3]
    state.cycle()
    assert finish_all(state) == [4]
    assert state.pause() == 0.0
    state.cycle()
    assert finish_all(state) == ["urgent"]
    state.close()
    assert counts(engine)["completed"] == 6


@pytest.mark.parametrize("engine", ["postgresql15", "mysql", "mariadb"], indirect=True)
@pytest.mark.parametrize("first", ["heartbeat", "reclaim"])
def test_a_reclaim_and_a_late_heartbeat_conflict(engine: Engine, first: str) -> None:
    """Whichever comes first: never does a heartbeat succeed of a worker whose jobs are taken."""
    put(engine, 1)
    state = state_of(engine, **STORED)
    state.cycle()
    silence(engine, state)
    beating = queue._of_worker(SendHeartbeat, state.heartbeats.host)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as one:
        if first == "heartbeat":
            assert one.scalar(beating) is True
            assert sl.Locks(engine).run(queue.requeue_stalled(600)) == 0  # it doesn't wait for the heartbeat
            one.commit()
            assert sl.Locks(engine).run(queue.requeue_stalled(600)) == 0
            assert counts(engine)["running"] == 1
            return
        assert one.scalar(queue.requeue_stalled(600)) == 1
        late = later(sl.Locks(engine).run, beating)
        with pytest.raises(FutureTimeout):
            late.result(0.5)
        one.commit()
        assert late.result(PATIENCE) is False
    assert counts(engine)["waiting"] == 1


@pytest.mark.parametrize("engine", ["postgresql15", "mysql", "mariadb"], indirect=True)
def test_a_reclaim_looks_again_when_it_has_locked_the_row(engine: Engine) -> None:
    """A heartbeat has come between the search for silent workers and the lock."""
    put(engine, 1)
    state = state_of(engine, **STORED)
    state.cycle()
    silence(engine, state)
    hasty = sl.Queue()
    impl: Any = hasty._requeue
    delete_silent = impl._delete

    def after_a_heartbeat(execution: Any, at: Any, host: str) -> bool:
        assert sl.Locks(engine).run(queue._of_worker(SendHeartbeat, host)) is True
        return bool(delete_silent(execution, at, host))

    impl._delete = after_a_heartbeat
    assert sl.Locks(engine).run(hasty.requeue_stalled(600)) == 0
    assert hosts(engine) == [state.heartbeats.host]
    assert counts(engine)["running"] == 1


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_capture_whose_reply_was_lost_returns_while_its_worker_lives(engine: Engine) -> None:
    put(engine, "known", "unknown", "late")
    state = state_of(engine, batch=1, **STORED)
    state.cycle()
    (known,) = begin_all(state)
    # a cut after the COMMIT of a capture
    fetched(engine, [], 1, host=state.heartbeats.host)
    state._reply_lost = True
    state._compare_if_due()
    assert (counts(engine)["running"], counts(engine)["waiting"]) == (1, 2)
    # and a COMMIT that arrives two heartbeats later
    fetched(engine, [], 2, host=state.heartbeats.host)
    for _ in range(2):
        beat(state)
    compare(state)
    assert (counts(engine)["running"], counts(engine)["waiting"]) == (1, 2)
    assert not known.lost
    with engine.connect() as connection:
        job = build_context(connection.dialect, {}).tables.job
        assert connection.scalar(select(func.sum(job.c.attempts))) == 1, "no handler has begun but one"
    state.done(known, None)
    assert sorted(finish_all(state) + [job.payload for job in fetched(engine, [], 9)]) == ["late", "unknown"]


@pytest.mark.parametrize("engine", ["postgresql15", "mysql", "sqlite"], indirect=True)
def test_a_capture_under_a_former_host_is_returned(engine: Engine) -> None:
    """The worker was silent, and its fetch was on its way when its row was deleted."""
    put(engine, 1)
    state = state_of(engine, **STORED)
    perform = state.database.perform

    def reclaimed_meanwhile(operation: Any) -> Any:
        rows = perform(operation)
        if operation._impl.name == "Queue.fetch":
            with engine.begin() as connection:
                connection.execute(delete(build_context(connection.dialect, {}).tables.worker))
            state.heartbeats.beat(state.database)
        return rows

    state.database.perform = reclaimed_meanwhile  # type: ignore[method-assign]
    state._fetch()
    assert not (state.waiting)
    assert not (state.ready)
    assert counts(engine)["waiting"] == 1


@pytest.mark.parametrize("engine", ["postgresql15", "sqlite"], indirect=True)
def test_a_job_that_others_ended_is_lost(engine: Engine) -> None:
    put(engine, 1, 2)
    state = state_of(engine, **STORED)
    state.cycle()
    one, two = begin_all(state)
    with engine.begin() as connection:
        assert connection.scalar(queue.release(one)) == 1
        assert connection.scalar(queue.complete(two)) == 1  # as its handler may do
    compare(state)
    assert (one.lost, two.lost) == (True, False)


def test_no_worker_is_judged_before_all_could_send_a_heartbeat(lite: Engine) -> None:
    put(lite, 1)
    fetched(lite, [], 1)
    with lite.begin() as connection:
        silenced(connection)
    state = state_of(lite, **STORED)
    for contact in (False, True):
        beat(state)  # the first contact, or the first one after an outage
        state._requeue_at = -float("inf")
        state._requeue_silent()
        assert counts(lite)["running"] == 1
        if not contact:
            steady(state.heartbeats)
            state.heartbeats._contact_at -= 10 * STORED["stalled_after"]
    steady(state.heartbeats)
    state._requeue_silent()
    assert counts(lite)["waiting"] == 1


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_server_clock_that_is_set_makes_no_worker_silent(lite: Engine, seconds: int) -> None:
    """Set back, this worker's own heartbeat is later than all others; set forward, theirs are as old as that."""
    put(lite, 1)
    other, state = state_of(lite, **STORED), state_of(lite, **STORED)
    other.cycle()
    before_that = other if seconds > 0 else state
    with lite.begin() as connection:
        worker = build_context(connection.dialect, {}).tables.worker
        stamp = PlusSeconds(Now(), literal(-float(seconds)))
        its_row = worker.c.host == before_that.heartbeats.host
        connection.execute(update(worker).where(its_row).values(heartbeat_at=stamp))
    steady(state.heartbeats)
    if seconds > 0:
        state.heartbeats._server_ahead = time.time() - seconds - clock()
    state._requeue_silent()
    assert counts(lite)["running"] == 1
    if seconds > 0:
        assert not state.heartbeats.steady()
        steady(state.heartbeats)
        state._requeue_silent()  # it is silent in fact
        assert counts(lite)["waiting"] == 1


def test_a_heartbeat_counts_from_before_it_is_sent(lite: Engine) -> None:
    state, sent = state_of(lite, **STORED), list[float]()
    event.listen(lite, "before_cursor_execute", lambda *_: sent.append(clock()))
    beat(state)
    assert state.heartbeats.confirmed_at <= sent[0]


def test_a_worker_judges_itself_first(lite: Engine) -> None:
    put(lite, 1, 2)
    state = state_of(lite, concurrency=1, **STORED)
    state.cycle()
    (job,) = begin_all(state)
    state.heartbeats.confirmed_at -= STORED["stalled_after"] + 1
    assert job.lost
    state.done(job, None)
    state.cycle()
    assert state.take() is None
    beat(state)
    assert not job.lost
    assert finish_all(state) == [2]


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_live_workers_keep_old_jobs(engine: Engine) -> None:
    """And a job that was captured without a worker stalls by its age."""
    put(engine, "of a worker", "of the app")
    state, other = state_of(engine, batch=1, **STORED), state_of(engine, **STORED)
    state.cycle()
    with engine.begin() as connection:
        assert len(connection.execute(queue.capture(1, host="web-1")).all()) == 1
        job = build_context(connection.dialect, {}).tables.job
        connection.execute(update(job).values(started_at=SecondsAgo(3600.0)))
    sweep(other)
    assert [job.payload for job in fetched(engine, [], 9)] == ["of the app"]


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_a_worker_of_own_tables_in_another_schema(servers: Servers, name: str) -> None:
    url = servers.fresh(name, PLAIN[name])
    engine = create_engine(url)
    place = "elsewhere" if engine.dialect.name == "postgresql" else None

    class Base(DeclarativeBase):
        pass

    class Mail(sl.JobColumns, Base):
        __tablename__ = "mail"
        __table_args__ = {"schema": place}

    class MailWorker(sl.WorkerColumns, Base):
        __tablename__ = "mail_worker"
        __table_args__ = {"schema": place}

    class Astray(sl.WorkerColumns, Base):
        __tablename__ = "astray_worker"
        __table_args__ = {"schema": "astray"}

    with pytest.raises(ValueError, match="must be in the schema of"):
        sl.Queue(Mail, workers=Astray)
    with pytest.raises(ValueError, match="workers=MailWorker"):
        sl.Worker(sl.Queue(Mail), print, bind=engine)
    mails = sl.Queue(Mail, workers=MailWorker)
    mails.indexes()
    with engine.begin() as connection:
        if place is not None:
            connection.exec_driver_sql(f"CREATE SCHEMA {place}")
        Base.metadata.create_all(connection, [Mail.__table__, MailWorker.__table__])  # type: ignore[list-item]
        connection.execute(mails.put(1, 2))
    dead, state = (state_for(sl.Worker(mails, print, bind=engine, **STORED, batch=1)) for _ in range(2))
    dead.cycle()
    assert len(begin_all(dead)) == 1
    with engine.begin() as connection:
        connection.execute(
            update(MailWorker).where(MailWorker.host == dead.heartbeats.host).values(heartbeat_at=SecondsAgo(3600.0))
        )
    sweep(state)
    with engine.connect() as connection:
        assert list(connection.execute(select(MailWorker.host)).scalars()) == [state.heartbeats.host]
        assert [tuple(row)[1:5] for row in connection.execute(mails.stats())] == [(2, 0, 0, 0)]
    done: list[Any] = []
    sl.Worker(mails, lambda job: done.append(job.payload), bind=engine).run(until_empty=True)
    assert sorted(done) == [1, 2]
    engine.dispose()


def test_a_worker_without_a_table_of_workers_refuses_to_run(engine_to: MakeEngine, servers: Servers) -> None:
    engine = create_engine(servers.fresh("sqlite", PLAIN["sqlite"]))
    with pytest.raises(sl.NotInstalled):
        sl.Worker(queue, print, bind=engine).run()
    engine.dispose()


KILLER = """
import os, sys, threading
from sqlalchemy import create_engine
import sqlalchemy_locks as sl

three = threading.Barrier(3)

def handler(job):
    os.write(1, f"{job.payload} {job.attempts}\\n".encode())  # in one piece
    if job.error is None:
        three.wait(30)  # all are running
    if job.payload == "kills":
        os._exit(9)
    if job.error is None:
        three.wait(60)  # for the end of the process

sl.Worker(sl.Queue(), handler, bind=create_engine(sys.argv[1]), concurrency=3, retry_in=0, poll=0.05).run(
    until_empty=True
)
"""


@pytest.mark.parametrize("name", ["postgresql15", "mariadb", "sqlite"])
def test_a_job_that_kills_its_process_dies_alone(
    servers: Servers, engine_to: MakeEngine, name: str, tmp_path: Path
) -> None:
    engine = engine_to(name)
    put(engine, "beside", "kills", "beside", max_attempts=3)
    began: list[str] = []
    for _ in range(4):
        status, out, err = main(KILLER, tmp_path, servers.installed(name, PLAIN[name]))
        began += out.splitlines()
        if status == 0:
            break
        assert status == 9, err
        with engine.begin() as connection:
            silenced(connection)
            assert connection.scalar(queue.requeue_stalled(3600)) > 0
    assert Counter(began) == {"beside 1": 2, "beside 2": 2, "kills 1": 1, "kills 2": 1, "kills 3": 1}
    assert counts(engine) == {"all": 3, "completed": 2, "dead": 1, "running": 0, "waiting": 0}


def test_a_suspect_runs_alone(lite: Engine) -> None:
    put(lite, "suspect")
    put(lite, "other", priority=1)
    fetched(lite, [], 1)
    state, more = (state_of(lite, concurrency=2, batch=4, prefetch=4) for _ in range(2))
    state.cycle()
    (other,) = begin_all(state)
    state.ready.clear()
    with lite.begin() as connection:
        job = build_context(connection.dialect, {}).tables.job
        connection.execute(
            update(job)
            .where(job.c.started_at.is_(None) | (job.c.attempts == 0))
            .values(error="stalled: its worker sent no heartbeat", started_at=None, run_at=SecondsAgo(60.0))
        )
    assert more.heartbeats.recent()
    more._fetch()
    (suspect,) = more.waiting
    assert suspect._is_suspect
    more.running[0] = other
    assert begin_all(more) == []
    more.running.clear()
    assert [job.payload for job in begin_all(more)] == ["suspect"]
    put(lite, "next")
    more._fetch()
    assert not more.waiting, "nothing is begun beside it"


def test_rows_of_workers_come_and_go(lite: Engine) -> None:
    put(lite, 1)
    during: list[list[str]] = []
    sl.Worker(queue, lambda _: during.append(hosts(lite)), bind=lite, host="web").run(until_empty=True)
    ((host,),) = during
    assert host.startswith("web:")
    assert hosts(lite) == []


def test_a_worker_without_jobs_is_forgotten_after_a_day(lite: Engine) -> None:
    long_ago, today, state = state_of(lite, **STORED), state_of(lite, **STORED), state_of(lite, **STORED)
    with lite.begin() as connection:
        worker = build_context(connection.dialect, {}).tables.worker
        for each, seconds in ((long_ago, 100_000.0), (today, 3600.0)):
            silent = update(worker).where(worker.c.host == each.heartbeats.host)
            connection.execute(silent.values(heartbeat_at=PlusSeconds(Now(), -seconds)))
    sweep(state)
    assert set(hosts(lite)) == {today.heartbeats.host, state.heartbeats.host}


@pytest.mark.parametrize("name", KINDS)
def test_a_drained_pool_delays_no_heartbeat(engine_to: MakeEngine, name: str) -> None:
    bind, engine = engine_to(name, pool_size=1, max_overflow=0, pool_timeout=60), engine_to(name)
    put(engine, 1)
    begun, go_on = threading.Event(), threading.Event()

    def handler(_: Any) -> None:
        with bind.connect():
            begun.set()
            assert go_on.wait(PATIENCE)

    def silent() -> bool:
        with engine.connect() as connection:
            worker = build_context(connection.dialect, {}).tables.worker
            return bool(connection.scalar(select(worker.c.heartbeat_at < SecondsAgo(600.0))))

    with running(sl.Worker(queue, handler, bind=bind, heartbeat=0.1, stalled_after=60)):
        assert begun.wait(PATIENCE)
        with engine.begin() as connection:
            silenced(connection)
        until(lambda: not silent())
        go_on.set()
    assert counts(engine)["completed"] == 1


def test_stalled_jobs_of_other_queues_are_left(lite: Engine) -> None:
    put(lite, 1, queue="other")
    put(lite, 2)
    with lite.begin() as connection:
        assert len(connection.execute(queue.capture(5, queue="other")).all()) == 1
        assert len(connection.execute(queue.capture(5)).all()) == 1
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    sweep(state)
    assert (counts(lite)["running"], counts(lite)["waiting"]) == (1, 1)


def test_a_sweep_requeues_every_batch(lite: Engine) -> None:
    put(lite, *range(1005))
    with lite.begin() as connection:
        connection.execute(queue.capture(1005)).all()
        silenced(connection)
    state = state_of(lite, heartbeat=1, stalled_after=3600)
    sweep(state)
    assert counts(lite)["running"] == 0


@pytest.mark.parametrize("kind", ["completes", "releases"])
def test_jobs_lost_to_others_are_logged(lite: Engine, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A handler that completes its job, in the transaction of its work, has lost nothing."""
    put(lite, 1)
    runs: list[Any] = []

    def handler(job: Any) -> None:
        runs.append(job.payload)
        with lite.begin() as connection:
            connection.execute(queue.release(job) if kind == "releases" and len(runs) == 1 else queue.complete(job))

    with caplog.at_level(logging.WARNING, "sqlalchemy_locks.worker"):
        sl.Worker(queue, handler, bind=lite, poll=0.05).run(until_empty=True)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (kind == "releases"), logged
    assert all("before this worker finished them: 1" in each for each in logged)

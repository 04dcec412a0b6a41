"""Mutexes, timeouts, semaphores, leases and captures on several nodes at the same time: right, and every error is a named one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.clusters.conftest import Cluster, add, crowd
from tests.fixtures.parties import PATIENCE, seen, unused

#: what may leave a call that isn't given a timeout, when the others were the first to commit four times in a row
NAMED = {sl.MustRollback, sl.LockLost}


def on_each_node(cluster: Cluster) -> list[Any]:
    return [sl.Locks(cluster.engine(number % 3)) for number in range(4)]


def test_mutex(cluster: Cluster) -> None:
    name, holders, locks = unused(), [0], on_each_node(cluster)
    most = [0]

    def run(client: int) -> bool:
        if not locks[client].mutex.acquire(name):
            return False
        holders[0] += 1
        most[0] = max(most[0], holders[0])
        holders[0] -= 1
        while True:
            with suppress(*NAMED):
                return bool(locks[client].mutex.release(name))

    done, errors = crowd(run, each=10)
    assert done
    assert most[0] == 1
    assert errors.keys() <= NAMED


def test_once_per(cluster: Cluster) -> None:
    locks, numbers = on_each_node(cluster), [iter(range(100)) for _ in range(4)]
    name = unused()

    def run(client: int) -> bool:
        number = next(numbers[client])
        while True:
            with suppress(*NAMED):
                return bool(locks[client].once_per(f"{name} {number}", every=86400))

    done, errors = crowd(run, each=10)
    assert (done, errors) == (10, {})


def test_semaphore_and_lease(cluster: Cluster) -> None:
    room, lease, locks = unused("room"), unused("lease"), on_each_node(cluster)
    locks[0].run(sl.semaphore.create(room, 2))
    cluster.catch_up()
    inside: Counter[str] = Counter()
    most: Counter[str] = Counter()
    guard = threading.Lock()

    def hold(name: str) -> None:
        with guard:
            inside[name] += 1
            most[name] = max(most[name], inside[name])
        time.sleep(0.005)
        with guard:
            inside[name] -= 1

    def run(client: int) -> bool:
        with locks[client].semaphore(room, timeout=PATIENCE):
            hold(room)
        with locks[client].lease(lease, ttl=60, timeout=PATIENCE):
            hold(lease)
        return True

    done, errors = crowd(run, each=5)
    assert (done, errors) == (20, {})  # with a timeout, conflicts are waited out
    assert most[room] <= 2
    assert most[lease] == 1


def test_captures(cluster: Cluster) -> None:
    queue, name, locks = sl.Queue(), unused("queue"), on_each_node(cluster)
    with Session(cluster.engine(0)) as session:
        session.execute(queue.put(*range(40), queue=name))
        session.commit()
    cluster.catch_up()
    captured: Counter[Any] = Counter()

    def run(client: int) -> bool:
        with suppress(*NAMED):
            jobs = locks[client].run(queue.capture(3, queue=name))
            captured.update(job.payload for job in jobs)
            while jobs:
                with suppress(*NAMED):
                    locks[client].run(queue.complete(jobs))
                    break
        return True

    _, errors = crowd(run, each=10)
    assert not errors
    while jobs := locks[0].run(queue.capture(40, queue=name)):
        captured.update(job.payload for job in jobs)
    assert captured == Counter(range(40))


def test_workers(cluster: Cluster) -> None:
    queue, name, handled = sl.Queue(), unused("queue"), Counter[Any]()
    with Session(cluster.engine(0)) as session:
        session.execute(queue.put(*range(30), queue=name))
        session.commit()
    cluster.catch_up()

    def run(client: int) -> bool:
        worker = sl.Worker(
            queue, lambda job: handled.update([job.payload]), bind=cluster.engine(client), name=name, concurrency=2
        )
        worker.run(until_empty=True)
        return True

    assert crowd(run, each=1, clients=3) == (3, {})
    assert handled == Counter(range(30))


def test_conflict_at_rollback_leaves_the_app_s_own_error(cluster: Cluster) -> None:
    key, counter = unused(), cluster.counter()
    one, two = sl.Locks(cluster.engine(0)), sl.Locks(cluster.engine(1, pool_size=1, max_overflow=0, pool_timeout=1))
    for _ in range(2):
        with pytest.raises(ValueError, match="the app's"), two.exclusive(key, timeout=PATIENCE) as held:
            add(held.session, counter)
            with one.exclusive(key, timeout=PATIENCE) as first:
                add(first.session, counter)
            cluster.catch_up()
            raise ValueError("the app's")
    assert cluster.number(counter) == 2


def test_no_savepoint_hides_that_another_node_was_first(cluster: Cluster) -> None:
    """MySQL answers the first SAVEPOINT after that with OK, and goes on in another transaction."""
    key, counter = unused(), cluster.counter()
    one, two = sl.Locks(cluster.engine(0)), sl.Locks(cluster.engine(1))
    if cluster.name == "group_replication":
        for make in (Session, Engine.connect):
            with make(cluster.engine(0)) as session:
                session.execute(sl.lock.exclusive(key))
                with pytest.raises(sl.Unsupported, match="leave it out"), session.begin_nested():
                    session.execute(text("SELECT 1"))
                session.rollback()
                with session.begin_nested():  # in the next transaction, which has no locks
                    session.execute(text("SELECT 1"))
    with pytest.raises(sl.LockLost), two.exclusive(key) as held:
        with one.exclusive(key, timeout=PATIENCE) as first:
            add(first.session, counter)
        cluster.catch_up()
        with suppress(SQLAlchemyError):
            held.session.connection().exec_driver_sql("SAVEPOINT mine")  # as text, which passes
            held.session.execute(text("UPDATE counter SET number = 100"))
    assert cluster.number(counter) == 1


def test_minority_at_commit(cluster: Cluster) -> None:
    """What a node denies that has lost its majority during COMMIT, the others may have: the outcome is unknown."""
    if cluster.name != "galera":
        pytest.skip("a member that was cut off has to be started again")
    key, counter = unused(), cluster.counter()
    locks = sl.Locks(cluster.engine(0))
    with pytest.raises(sl.OutcomeUnknown), locks.exclusive(key) as held:
        add(held.session, counter)
        for node in cluster.nodes[1:]:
            node.pause()
    with pytest.raises(sl.NotWritable, match="majority"), locks.exclusive(key, timeout=5):
        pass
    with pytest.raises(sl.NotWritable, match="majority"):
        locks.mutex.acquire(key)
    for node in cluster.nodes[1:]:
        node.resume()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(sl.LockError, DBAPIError), locks.exclusive(key, timeout=5) as held:
            add(held.session, counter)
            break
    assert cluster.number(counter) in (1, 2)


def test_statements_of_a_node(cluster: Cluster) -> None:
    engine, key = cluster.engine(0), unused()
    locks = sl.Locks(engine)
    for _ in range(2):
        with seen(engine) as statements, locks.exclusive(key) as held:
            held.session.execute(text("SELECT 1"))
    # as many as on one server; Group Replication needs a read before the marker
    assert len(statements) == 5 + (cluster.name == "group_replication"), statements

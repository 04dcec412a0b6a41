"""What a job costs, captured and completed, beside raw psycopg with the same statements, on PostgreSQL.

    python -m benchmarks.queue

A server is started (see tests/servers) and pinned, with this process, to one processor: on two, one and the same
operation has two speeds. Every figure is a ratio inside one run, the median of rounds that take turns.

The targets are those beside pgqueuer (at least 2 and 3 times its jobs per second, with batches of 10 and 100),
which took 2.9 and 4.4 times what raw psycopg took where it was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from sqlalchemy import URL, Engine, create_engine, make_url, text

import sqlalchemy_locks as sl

from .lock import verdict
from .mutex import database
from .wire import Wire

ROUNDS, JOBS = 5, 2000
#: what raw may be exceeded by, for each batch: must, aim
TARGETS = {10: (2.9 / 2, 2.9 / 3), 100: (4.4 / 3, 4.4 / 4.5)}

CAPTURE = """
WITH c AS MATERIALIZED (SELECT internal_id FROM lock.job WHERE queue_id = %s AND started_at IS NULL AND run_at <= now()
  ORDER BY priority, run_at, internal_id LIMIT {batch} FOR NO KEY UPDATE SKIP LOCKED)
UPDATE lock.job j SET claim = claim + 1, attempts = attempts + 1, started_at = clock_timestamp(),
  heartbeat_at = clock_timestamp(), processing_host = 'raw'
FROM c WHERE j.internal_id = c.internal_id RETURNING j.*
"""
COMPLETE = """
UPDATE lock.job j SET completed_at = clock_timestamp(), heartbeat_at = NULL
FROM unnest(%s::bigint[], %s::bigint[]) AS mine(id, claim)
WHERE j.internal_id = mine.id AND j.claim = mine.claim AND heartbeat_at IS NOT NULL
"""

queue = sl.Queue()
#: Works through so many jobs, in batches of so many.
Variant = Callable[[int], object]


def fill(engine: Engine, number: int, *, finished: int = 0) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE lock.job"))
        for ended, many in (("clock_timestamp()", finished), ("NULL", number)):
            connection.execute(
                text(
                    "INSERT INTO lock.job (external_id, payload, started_at, completed_at)"
                    f" SELECT gen_random_uuid(), '{{}}', {ended}, {ended} FROM generate_series(1, {many})"
                )
            )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE lock.job"))


def raw(connection: Any) -> Variant:
    def run(batch: int) -> None:
        cursor, capture = connection.cursor(), CAPTURE.format(batch=batch)
        while jobs := cursor.execute(capture, ("default",)).fetchall():
            cursor.execute(COMPLETE, ([job[0] for job in jobs], [job[6] for job in jobs]))

    return run


def held(engine: Engine) -> Variant:
    def run(batch: int) -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while jobs := connection.execute(queue.capture(batch)).all():
                connection.execute(queue.complete(jobs))

    return run


def worked(engine: Engine, concurrency: int) -> Variant:
    def run(batch: int) -> None:
        left = JOBS

        def handler(_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                worker.stop()

        worker = sl.Worker(queue, handler, bind=engine, concurrency=concurrency, batch=batch)
        worker.run()

    return run


@contextlib.contextmanager
def variants(url: URL, commit: str) -> Iterator[dict[str, Variant]]:
    engine = create_engine(url, connect_args={"options": f"-c synchronous_commit={commit}"})
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True, options=f"-c synchronous_commit={commit}") as connection:
        yield {
            "raw": raw(connection),
            "held connection": held(engine),
            "Worker, 1 thread": worked(engine, 1),
            "Worker, 4 threads": worked(engine, 4),
        }
    engine.dispose()


def report_ratios(url: URL, commit: str) -> None:
    engine = create_engine(url)
    print(f"\ncaptured and completed, synchronous_commit {commit}")
    for batch in (1, 10, 100):
        with variants(url, commit) as made:
            spent: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(ROUNDS):
                for name, run in made.items():
                    fill(engine, JOBS)
                    began = time.perf_counter()
                    run(batch)
                    spent[name].append((time.perf_counter() - began) / JOBS * 1e6)
        medians = {name: statistics.median(each) for name, each in spent.items()}
        for name, median in medians.items():
            ratio = median / medians["raw"]
            must, aim = TARGETS.get(batch, (None, None)) if name.startswith("Worker") else (None, None)
            told = f"{ratio:5.2f} x raw" if name != "raw" else ""
            print(f"  batch {batch:3}  {name:18} {median:7.1f} us a job  {told:12} {verdict(ratio, must, aim)}")
    engine.dispose()


def report_round_trips(url: URL) -> None:
    engine = create_engine(url)
    fill(engine, 100)
    wire = Wire(str(url.host), int(url.port or 0))
    through = create_engine(url.set(port=wire.port))
    print("\nround trips")
    with through.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for name, operation in {
            "put, 10 jobs": queue.put(*range(10)),
            "capture, 10 jobs": queue.capture(10),
            "complete, 10 jobs": queue.complete([(number, 1) for number in range(10)]),
        }.items():
            connection.execute(operation)
            before = wire.round_trips
            connection.execute(operation)
            trips = wire.round_trips - before
            print(f"  {name:18} {trips}  {verdict(trips, 1, 1)}")
    through.dispose()
    engine.dispose()
    wire.close()


def report_growth(url: URL) -> None:
    """A capture of 10 with few and with many jobs that wait, and behind many that are done."""
    engine = create_engine(url)
    print("\ngrowth of a capture of 10")
    first = 0.0
    for waiting, finished in ((1000, 0), (100_000, 0), (100_000, 1_000_000)):
        fill(engine, waiting, finished=finished)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            spent = []
            for _ in range(60):
                began = time.perf_counter()
                connection.execute(queue.capture(10)).all()
                spent.append(time.perf_counter() - began)
        median = statistics.median(spent[10:])
        first = first or median
        print(
            f"  {waiting:9,} wait, {finished:9,} done  {median * 1e6:6.0f} us  {median / first:5.2f} x the first  "
            f"{verdict(median / first, 1.5, 1.15)}"
        )
    engine.dispose()


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__.splitlines()[0]).parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # children, so the server too, inherit it
    with database("postgresql15") as url:
        url = make_url(str(url.render_as_string(hide_password=False)))
        report_round_trips(url)
        report_growth(url)
        for commit in ("off", "on"):
            report_ratios(url, commit)


if __name__ == "__main__":
    main()

"""The cost of a job on PostgreSQL, captured and completed: raw psycopg, pgqueuer and procrastinate compared.

    make bench ONLY=queue

A durable server is started (see tests/servers) and pinned, with this process, to one processor: on two, one and the
same operation has two speeds. Every figure is a ratio within one run, the median of alternating rounds. Growth is
counted in CPU time, of this process and the server together, which other load doesn't change.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import sqlalchemy_locks as sl

from .mutex import database
from .queue_peers import pgqueuer, procrastinates
from .report import judge
from .wire import Wire

ROUNDS, JOBS = 5, 10_000
#: the ratio of jobs per second to a peer's, for each batch size: must, aim
TARGETS = {("pgqueuer", 10): (2, 3), ("pgqueuer", 100): (3, 4.5), ("procrastinate", 10): (12, 22)}
TARGETS["procrastinate", 100] = (40, 60)
WORKER, ASYNC_WORKER = "Worker, 4 threads", "AsyncWorker, 4 tasks"

CAPTURE = """
WITH c AS MATERIALIZED (SELECT internal_id FROM lock.job WHERE queue_id = %s AND started_at IS NULL AND run_at <= now()
  ORDER BY priority, run_at, internal_id LIMIT {batch} FOR NO KEY UPDATE SKIP LOCKED)
UPDATE lock.job j SET claim = claim + 1, attempts = attempts + 1, started_at = clock_timestamp(),
  processing_host = 'raw'
FROM c WHERE j.internal_id = c.internal_id RETURNING j.*
"""
COMPLETE = """
UPDATE lock.job j SET completed_at = clock_timestamp()
FROM unnest(%s::bigint[], %s::bigint[]) AS mine(id, claim)
WHERE j.internal_id = mine.id AND j.claim = mine.claim AND j.completed_at IS NULL AND j.failed_at IS NULL
"""

queue = sl.Queue()
#: processes n jobs, in batches of a size
Variant = Callable[[int], object]


def fill(engine: Engine, number: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE lock.job"))
        connection.execute(
            text(
                "INSERT INTO lock.job (external_id, payload)"
                f" SELECT gen_random_uuid(), '{{}}' FROM generate_series(1, {number})"
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


def worked(engine: Engine, concurrency: int, jobs: int = JOBS, *, prefetches: bool = True) -> Variant:
    def run(batch: int) -> None:
        left = jobs

        def handler(_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                worker.stop()

        prefetch = batch if prefetches else 0
        worker = sl.Worker(queue, handler, bind=engine, concurrency=concurrency, batch=batch, prefetch=prefetch)
        worker.run()

    return run


def awaited(made: Callable[[], AsyncEngine], concurrency: int, jobs: int = JOBS) -> Variant:
    """The same by an ``AsyncWorker``; each run has an event loop of its own, and thus an engine."""

    def run(batch: int) -> None:
        left = jobs

        async def handler(_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                worker.stop()

        async def run_worker() -> None:
            nonlocal worker
            engine = made()
            worker = sl.AsyncWorker(queue, handler, bind=engine, concurrency=concurrency, batch=batch, prefetch=batch)
            await worker.run()
            await engine.dispose()

        worker: Any = None
        asyncio.run(run_worker())

    return run


class Processor:
    """Return the CPU time of this process and a server in seconds, without background processes."""

    def __init__(self, engine: Engine) -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ALTER SYSTEM SET autovacuum = off"))
            connection.execute(text("SELECT pg_reload_conf()"))
            self._server = self._stat(connection.scalar(text("SELECT pg_backend_pid()")))[1]

    def __call__(self) -> float:
        while True:
            before = self._stat(self._server)[13:15]
            ticks = sum(before)  # of ended sessions
            for process in Path("/proc").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    stat = self._stat(int(process.name))
                    ticks += sum(stat[11:13]) if stat[1] == self._server else 0
            if self._stat(self._server)[13:15] == before:  # otherwise one has ended meanwhile, and was counted twice
                return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _stat(process: int) -> list[int]:
        """Return the fields after a process's state: its parent's id, its times."""
        _, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        return [0, *map(int, rest.split()[1:20])]


class Measured(NamedTuple):
    """A way to process jobs."""

    #: puts n jobs
    fill: Callable[[int], None]
    work: Variant
    jobs: int


@contextlib.contextmanager
def variants(url: URL, commit: str) -> Iterator[dict[str, Measured]]:
    options = {"options": f"-c synchronous_commit={commit}"}
    engine = create_engine(url, connect_args=options)
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)

    def ours(work: Variant) -> Measured:
        return Measured(partial(fill, engine), work, JOBS)

    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(
            psycopg.connect(plain, autocommit=True, options=f"-c synchronous_commit={commit}")
        )
        made = {
            "raw": ours(raw(connection)),
            "held connection": ours(held(engine)),
            "Worker, 1 thread": ours(worked(engine, 1)),
            WORKER: ours(worked(engine, 4)),
            ASYNC_WORKER: ours(awaited(partial(create_async_engine, url, connect_args=options), 4)),
            "without prefetch": ours(worked(engine, 4, prefetches=False)),
        }
        for name, peer, jobs in (("pgqueuer", pgqueuer, JOBS), ("procrastinate", procrastinates, JOBS // 10)):
            made[name] = Measured(*opened.enter_context(peer(url, commit)), jobs)
        yield made
    engine.dispose()


def report_ratios(url: URL, commit: str) -> None:
    print(f"\ncaptured and completed, synchronous_commit {commit}")
    with variants(url, commit) as made:
        for batch in (1, 10, 100):
            spent: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(ROUNDS):
                for name, (refill, work, jobs) in made.items():
                    refill(jobs)
                    began = time.perf_counter()
                    work(batch)
                    spent[name].append((time.perf_counter() - began) / jobs * 1e6)
            for name, each in spent.items():
                print(f"  batch {batch:3}  {name:18} {statistics.median(each):7.1f} us a job", flush=True)
            for name in made:
                if name == ASYNC_WORKER:
                    what = f"{ASYNC_WORKER} / {WORKER}, batch {batch}, {commit}"
                    judge(what, _ratios(spent[WORKER], spent[name]), *((0.6, 0.9) if batch > 1 else ()), least=True)
                elif name == WORKER:
                    judge(f"{WORKER} / raw, batch {batch}, {commit}", _ratios(spent[WORKER], spent["raw"]))
                elif (name, batch) in TARGETS:
                    what = f"jobs a second, {WORKER} / {name}, batch {batch}, {commit}"
                    judge(what, _ratios(spent[name], spent[WORKER]), *TARGETS[name, batch], least=True)


def _ratios(some: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]


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
            judge(f"{name}, round trips", trips, 1, 1)
    through.dispose()
    engine.dispose()
    wire.close()


def report_old_snapshot(url: URL) -> None:
    """Time a worker's batches of 10 while another session holds an older snapshot."""
    engine = create_engine(url, connect_args={"options": "-c synchronous_commit=off"})
    jobs, now = 20_000, Processor(engine)
    fill(engine, jobs)
    left = jobs
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as old:
        old.execute(text("SELECT count(*) FROM lock.job"))
        ended = [now()]

        def handler(_: Any) -> None:
            nonlocal left
            left -= 1
            if left % (jobs // 4) == 0:
                ended.append(now())
            if not left:
                worker.stop()

        worker = sl.Worker(queue, handler, bind=engine, concurrency=1, prefetch=10)
        worker.run()
    quarters = [(after - before) / (jobs / 40) * 1e6 for before, after in itertools.pairwise(ended)]
    print(f"\n{jobs:,} jobs under another session's old snapshot, by quarter")
    print("  " + " -> ".join(f"{quarter:.0f}" for quarter in quarters) + " us a batch")
    judge("capture under an old snapshot, last quarter / first", quarters[-1] / quarters[0], 1.5, 1.1)
    engine.dispose()


def report_generic_plan(url: URL) -> None:
    """Time captures of 10 by a plan that was made on an empty table, and by one that knows of its 100,000 rows."""
    with create_engine(url, isolation_level="AUTOCOMMIT").connect() as other:
        other.execute(text("ALTER TABLE lock.job SET (autovacuum_enabled = off)"))
        ratios = []
        for _ in range(3):
            took = []
            for analyzed in (False, True):
                other.execute(text("TRUNCATE lock.job"))
                engine = create_engine(url, connect_args={"options": "-c synchronous_commit=off"})
                with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    if not analyzed:
                        captured(connection, 20)
                    values = "SELECT gen_random_uuid(), '{}' FROM generate_series(1, 100000)"
                    other.execute(text(f"INSERT INTO lock.job (external_id, payload) {values}"))
                    if analyzed:
                        other.execute(text("ANALYZE lock.job"))
                        captured(connection, 20)
                    began = time.perf_counter()
                    captured(connection, 200)
                    took.append(time.perf_counter() - began)
                engine.dispose()
            ratios.append(took[0] / took[1])
        other.execute(text("ALTER TABLE lock.job RESET (autovacuum_enabled)"))
    print()
    judge("a plan of an empty table, 100,000 rows: capture / analysed", ratios, 1.3, 1.05)


def captured(connection: Connection, times: int) -> None:
    for _ in range(times):
        connection.execute(queue.capture(10)).all()


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__.splitlines()[0]).parse_args()
    with database("postgresql15") as url:
        url = make_url(str(url.render_as_string(hide_password=False)))
        report_round_trips(url)
        report_old_snapshot(url)
        report_generic_plan(url)
        for commit in ("off", "on"):
            report_ratios(url, commit)


if __name__ == "__main__":
    main()

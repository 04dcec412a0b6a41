"""What pausable queues and unique keys cost where nothing is paused and no job has a key.

    make bench ONLY='queue_columns[:postgresql15|mysql|mariadb|sqlite]'

The same table of jobs is worked off, in batches, by a queue with a table of paused queues and by one without; and jobs
are put into a table with a column for unique keys, and its index, and into one without. A server is started (see
tests/servers) and pinned, with this process, to one processor. Every figure is a ratio
within one run, the median of alternating rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine, Index, MetaData, String, Table, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl

from .mutex import DRIVERS, database

ROUNDS, BATCHES, BATCH, WAITING = 15, 40, 10, 100_000
HOST = {"queue": "default", "host": "bench"}


class Base(DeclarativeBase):
    pass


class Job(sl.JobColumns, Base):
    __tablename__ = "bench_job"


class Paused(Base):
    __tablename__ = "bench_paused"
    id: Mapped[str] = mapped_column(String(255), primary_key=True)


sl.Queue(Job).indexes()
job: Any = Job.__table__
#: the same without a column for unique keys
bare = Table("bench_bare", MetaData(), *(column._copy() for column in job.columns if column.name != "unique_key"))
for index in job.indexes:
    if not index.unique:
        columns = [bare.c[column.name] for column in index.columns]
        made = Index(str(index.name).replace("job", "bare"), *columns, **index.dialect_kwargs)
        made.ddl_if(dialect=index._ddl_if.dialect) if index._ddl_if else made


@contextlib.contextmanager
def engine_of(name: str) -> Iterator[Engine]:
    """Make the tables, on a server or in a file, and fill them."""
    with contextlib.ExitStack() as stack:
        if name == "sqlite":
            url: Any = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/bench.db"
        else:
            url = stack.enter_context(database(name))
        level = {} if name == "sqlite" else {"isolation_level": "READ COMMITTED"}
        engine = create_engine(url, **level)
        stack.callback(engine.dispose)
        Base.metadata.create_all(engine)
        bare.metadata.create_all(engine)
        yield engine


def ratio(variants: dict[str, Callable[[], object]]) -> float:
    """Return the median ratio of the first variant's time to the second's."""
    ratios = []
    for number in range(ROUNDS + 1):
        took = {}
        for name in list(variants)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            variants[name]()
            took[name] = time.perf_counter() - started
        first, second = (took[name] for name in variants)
        if number:
            ratios.append(first / second)
    return statistics.median(ratios)


def report(name: str) -> None:
    """Print the ratios of one engine."""
    with engine_of(name) as engine:
        tables = {"bench_job": sl.Queue(Job, notify=False), "bench_bare": sl.Queue(bare, notify=False)}
        with engine.begin() as connection:
            for table, queue in tables.items():
                for _ in range(WAITING // 10_000):
                    connection.execute(queue.put(*range(10_000)))
                analyze = "ANALYZE TABLE" if name in ("mysql", "mariadb") else "ANALYZE"
                connection.exec_driver_sql(f"{analyze} {table}").close()

        def work(queue: Any) -> Callable[[], None]:
            def run() -> None:
                with engine.connect() as connection:
                    done: list[Any] = []
                    for _ in range(BATCHES):
                        done = connection.execute(queue._fetch(done, BATCH, **HOST, after=None)).scalar_one().jobs
                        connection.commit()

            return run

        def puts(queue: Any) -> Callable[[], None]:
            def run() -> None:
                with engine.connect() as connection:
                    for number in range(BATCHES):
                        connection.execute(queue.put(*range(number, number + BATCH)))
                        connection.commit()

            return run

        fetched = ratio({"with": work(sl.Queue(Job, paused=Paused)), "without": work(sl.Queue(Job))})
        written = ratio({table: puts(queue) for table, queue in tables.items()})
        print(f"{name}: fetch of {BATCH}, with / without a table of paused queues: {fetched:.2f}")
        print(f"{name}: put of {BATCH}, with / without a column for unique keys: {written:.2f}", flush=True)


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_columns", description=__doc__.splitlines()[0])
    names = [*DRIVERS, "sqlite"]
    parser.add_argument("server", nargs="?", choices=names, help="which; all of them without")
    asked: str | None = parser.parse_args().server
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name in names if asked is None else [asked]:
        report(name)


if __name__ == "__main__":
    main()

"""The cost of a refresh of the page for the server, part by part, with a million completed jobs.

    make bench NAME='page [engine ...]'

The engines are those of tests/servers (postgresql15, mysql, mariadb), and sqlite; without one, all of them. First there
are a million completed jobs of the last 30 days, and then 100,000 more of the last hour, of which 50,000 are counted.
A part must not take more than MUST milliseconds; the page pauses ten times as long as a refresh took.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.admin import overview
from tests import servers
from tests.conftest import PLAIN, install

ROWS, DAYS, MORE = 1_000_000, 30, 100_000
MUST = 250.0
PARTS = {
    "semaphores": overview.semaphores,
    "holders": overview.holders(10),
    "ages": overview.ages,
    "queues": overview.queues,
    "stalled": overview.stalled,
    "completed": overview.completed,
    "mutexes": overview.mutexes,
    "timeouts": overview.timeouts,
    "maintenance": overview.maintenance,
    "changes": overview.changes,
}
_NUMBERS = "SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {rows}"
_RECURSIVE = f"WITH RECURSIVE numbers (n) AS ({_NUMBERS}) SELECT n FROM numbers"
#: for each engine: a series of numbers, an instant in the past, an external id, the table
_SPELT = {
    "postgresql": (
        "SELECT n FROM generate_series(1, {rows}) AS numbers (n)",
        "clock_timestamp() - make_interval(secs => n * {step})",
        "gen_random_uuid()",
        "lock.job",
    ),
    "mysql": (
        _RECURSIVE,
        "TIMESTAMPADD(MICROSECOND, -n * {step} * 1000000, UTC_TIMESTAMP(6))",
        "REPLACE(UUID(), '-', '')",
        "lock_job",
    ),
    "sqlite": (
        _RECURSIVE,
        "strftime('%Y-%m-%d %H:%M:%f000', 'now', round(-n * {step}, 3) || ' seconds')",
        "lower(hex(randomblob(16)))",
        "lock_job",
    ),
}


@contextlib.contextmanager
def database(name: str) -> Iterator[Engine]:
    """Create a database, and install the tables."""
    with contextlib.ExitStack() as opened:
        if name == "sqlite":
            url = f"sqlite:///{Path(opened.enter_context(tempfile.TemporaryDirectory())) / 'page.db'}"
        else:
            server = opened.enter_context(servers.start(name))
            assert isinstance(server, servers.SQLServer)
            server.create_database("page")
            url = server.url(PLAIN[name], "page")
        install(url)
        engine = create_engine(url)
        opened.callback(engine.dispose)
        yield engine


def fill(engine: Engine, rows: int, seconds: float) -> None:
    """Insert jobs completed within the last seconds."""
    dialect: Any = engine.dialect
    numbers, instant, external_id, table = _SPELT["mysql" if dialect.name == "mariadb" else dialect.name]
    instant = instant.format(step=seconds / rows)
    limits = {"mysql": "cte_max_recursion_depth", "mariadb": "max_recursive_iterations"}
    with engine.begin() as connection:
        if dialect.name in limits:
            limit = limits["mariadb" if dialect.is_mariadb else "mysql"]
            connection.exec_driver_sql(f"SET SESSION {limit} = 100000000")
        connection.exec_driver_sql(
            f"INSERT INTO {table} (external_id, queue_id, payload, started_at, completed_at) "
            f"SELECT {external_id}, 'mail', '{{}}', {instant}, {instant} FROM ({numbers.format(rows=rows)}) AS numbers"
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"ANALYZE {'TABLE ' if dialect.name in limits else ''}{table}")


def measure(locks: sl.Locks) -> None:
    """Print the time of each part."""
    for name, read in PARTS.items():
        times = []
        for _ in range(9):
            began = time.perf_counter()
            overview.look_at(locks, read)
            times.append((time.perf_counter() - began) * 1000)
        took = statistics.median(times)
        print(f"  {name:12} {took:7.1f} ms   must be ≤ {MUST:.0f}  {'ok' if took <= MUST else 'MISSED'}")


def main() -> None:
    """Run the command line."""
    every = ("sqlite", "postgresql15", "mysql", "mariadb")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page")
    parser.add_argument("engines", nargs="*", choices=[*every, []], metavar="engine")
    for name in parser.parse_args().engines or every:
        with database(name) as engine:
            locks = sl.Locks(engine)
            fill(engine, ROWS, DAYS * 86400)
            print(f"{locks.engine_name}, {ROWS:,} completed jobs of {DAYS} days")
            measure(locks)
            fill(engine, MORE, 3500)
            print(f"{locks.engine_name}, and {MORE:,} more of the last hour")
            measure(locks)


if __name__ == "__main__":
    main()

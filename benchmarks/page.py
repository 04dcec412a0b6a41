"""The time of `sqlalchemy-locks status` and of the page, and of each of their parts, in a large database.

    make bench NAME='page [engine ...]'

The engines are those of tests/servers (postgresql15, mysql, mariadb), and sqlite; without one, all of them. There are
10,000 semaphores (half of them leases), 100,000 permits, half of which are held, 1,000,000 jobs in 301 queues, 10,000
mutexes that are held, and 1,000 timeouts. Each total must not take more than MUST milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.admin import overview
from tests import servers
from tests.conftest import PLAIN, install

MUST = 300.0
SEMAPHORES, PERMITS, JOBS, MUTEXES, TIMEOUTS = 10_000, 100_000, 1_000_000, 10_000, 1_000
_NUMBERS = "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {rows})"
#: of each family: a series of numbers, an instant ``{ago}`` seconds in the past, an external id, concatenation, prefix
_SPELT = {
    "postgresql": (
        "SELECT n FROM generate_series(1, {rows}) AS numbers (n)",
        "clock_timestamp() - ({ago}) * interval '1 second'",
        "gen_random_uuid()",
        "'{text}' || ({n})",
        "lock.",
    ),
    "mysql": (
        f"{_NUMBERS} SELECT n FROM numbers",
        "TIMESTAMPADD(MICROSECOND, -({ago}) * 1000000, UTC_TIMESTAMP(6))",
        "REPLACE(UUID(), '-', '')",
        "CONCAT('{text}', {n})",
        "lock_",
    ),
    "sqlite": (
        f"{_NUMBERS} SELECT n FROM numbers",
        "strftime('%Y-%m-%d %H:%M:%f000', 'now', round(-({ago}), 3) || ' seconds')",
        "lower(hex(randomblob(16)))",
        "'{text}' || ({n})",
        "lock_",
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


class Filler:
    """Inserts rows in bulk."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        dialect: Any = connection.dialect
        self._analyze = "ANALYZE"
        if dialect.name in ("mysql", "mariadb"):
            limit = "max_recursive_iterations" if dialect.is_mariadb else "cte_max_recursion_depth"
            connection.exec_driver_sql(f"SET SESSION {limit} = 100000000")
            self._analyze = "ANALYZE TABLE"
        family = "mysql" if dialect.name == "mariadb" else dialect.name
        self._numbers, self._instant, self.uuid, self._text, self._prefix = _SPELT[family]

    def ago(self, seconds: str) -> str:
        return self._instant.format(ago=seconds)

    def text(self, text: str, n: str) -> str:
        return self._text.format(text=text, n=n)

    def insert(self, table: str, rows: int, **columns: str) -> None:
        """Insert rows numbered ``n``, from 1; each column is an expression."""
        self._connection.exec_driver_sql(
            f"INSERT INTO {self._prefix}{table} ({', '.join(columns)}) SELECT {', '.join(columns.values())} "
            f"FROM ({self._numbers.format(rows=rows)}) AS numbers".replace("%", "%%")
            if self._connection.dialect.paramstyle in ("format", "pyformat")
            else f"INSERT INTO {self._prefix}{table} ({', '.join(columns)}) SELECT {', '.join(columns.values())} "
            f"FROM ({self._numbers.format(rows=rows)}) AS numbers"
        )

    def analyze(self, *tables: str) -> None:
        for table in tables:
            self._connection.exec_driver_sql(f"{self._analyze} {self._prefix}{table}")


def fill(engine: Engine) -> None:
    """Insert everything."""
    with engine.begin() as connection:
        filler = Filler(connection)
        true, half = "1 = 1", SEMAPHORES // 2
        # one semaphore in a hundred is full
        size = f"CASE WHEN n > {half} THEN 1 WHEN n = 1 THEN 5000 WHEN n % 100 = 0 THEN 8 ELSE 20 END"
        filler.insert(
            "semaphore", SEMAPHORES, name=filler.text("semaphore-", "n"), capacity=size, on_demand=f"n > {half}"
        )
        filler.insert(
            "permit_request",
            PERMITS,
            external_id=filler.text("request-", "n"),
            owner=filler.text("worker-", "n % 100"),
            state="CASE WHEN n % 2 = 0 THEN 'ACQUIRED' ELSE 'RELEASED' END",
            ttl_seconds="CASE WHEN n % 4 = 0 THEN 3600 END",
            token="NULL",
            created_at=filler.ago(f"({PERMITS} - n) * 1.1"),
            renewed_at=filler.ago("n % 3610"),
        )
        # of those held, a tenth are of one semaphore, and a tenth of leases
        # the first row is of no semaphore
        of = f"1 + CASE n % 20 WHEN 2 THEN 1 WHEN 4 THEN {half} + 1 + n / 20 ELSE 2 + n % {half - 1} END"
        filler.insert(
            "permit",
            PERMITS,
            semaphore_id=of.replace("n / 20", "FLOOR(n / 20)") if engine.dialect.name != "sqlite" else of,
            permit_request_id="n",
            count="1",
            fence="n",
            state="CASE WHEN n % 2 = 0 THEN 'ACQUIRED' ELSE 'RELEASED' END",
        )
        # half of the jobs wait, a third of those in one queue; of the rest most are completed
        queue = f"CASE WHEN n % 6 = 0 THEN 'bulk' ELSE {filler.text('queue-', 'n % 300')} END"
        job = {"external_id": filler.uuid, "queue_id": queue, "payload": "'{}'"}
        filler.insert("job", JOBS // 2, **job, run_at=filler.ago("CASE WHEN n % 10 = 0 THEN -n ELSE n / 10.0 END"))
        started = {**job, "started_at": filler.ago("n / 10.0")}
        filler.insert("job", 20_000, **started, heartbeat_at=filler.ago("n / 50.0"))
        filler.insert("job", 30_000, **started, failed_at=filler.ago("n / 10.0"))
        filler.insert("job", JOBS // 2 - 50_000, **started, completed_at=filler.ago("n / 30.0"))
        task = {"queue_id": "'default'", "id": filler.text("task-", "n")}
        filler.insert("task_state", MUTEXES, **task, acquired=true, owner="'worker-1'", acquired_at=filler.ago("n"))
        filler.insert("task_timeout", TIMEOUTS, **task, ts="n", timeout="60")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        Filler(connection).analyze("semaphore", "permit_request", "permit", "job", "task_state", "task_timeout")


def measure(what: str, call: Callable[[], Any], *, must: float | None = None) -> None:
    """Print the median time of some calls."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    took = statistics.median(times)
    verdict = "" if must is None else f"   must be ≤ {must:.0f}  {'ok' if took <= must else 'MISSED'}"
    print(f"  {what:24} {took:7.1f} ms{verdict}", flush=True)


def report(engine: Engine) -> None:
    """Print the time of each part."""
    from sqlalchemy_locks.integrations.dashboard import queries

    locks = sl.Locks(engine)
    print(f"{locks.engine_name}", flush=True)
    parts: dict[str, Any] = {
        "semaphores": overview.semaphores,
        "holders": overview.holders(10),
        "ages": overview.ages,
        "queues": overview.queues,
        "stalled": overview.stalled,
        "completed": overview.completed,
        "mutexes": overview.mutexes,
        "timeouts": overview.timeouts,
        "maintenance": overview.maintenance,
        "keys": overview.keys,
        "changes": overview.changes,
    }
    for name, read in parts.items():
        measure(name, lambda read=read: overview.look_at(locks, read))  # type: ignore[misc]
    measure("facts", lambda: queries.facts(locks))
    measure("page, all parts", lambda: queries.read_all(locks), must=MUST)


def main() -> None:
    """Run the command line."""
    every = ("sqlite", "postgresql15", "mysql", "mariadb")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page")
    parser.add_argument("engines", nargs="*", choices=[*every, []], metavar="engine")
    for name in parser.parse_args().engines or every:
        with database(name) as engine:
            fill(engine)
            report(engine)


if __name__ == "__main__":
    main()

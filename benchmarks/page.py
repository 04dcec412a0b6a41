"""The time of `sqlalchemy-locks status` and of the page, and of each of their parts, in a large database.

    make bench ONLY='page[:engine,...]'

The engines are those of tests/servers (postgresql15, mysql, mariadb), and sqlite; without one, all of them. There are
10,000 semaphores (half of them leases), 100,000 permits, half of which are held, 1,000,000 jobs in 251 queues, 10,000
mutexes that are held, and 1,000 timeouts. The page and status must not take more than MUST milliseconds each.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine, create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.cli.connect import Database
from sqlalchemy_locks.cli.status import _read as read_status
from sqlalchemy_locks.integrations.dashboard import queries
from sqlalchemy_locks.integrations.dashboard.serving import served
from tests import servers
from tests.conftest import PLAIN, install
from tests.fixtures.crowd import crowd

from .report import judge

MUST, AIM = 300.0, 100.0
ROWS = {
    "semaphores": 10_000,
    "held": 50_000,
    "released": 50_000,
    "jobs": 1_000_000,
    "queues": 300,
    "mutexes": 10_000,
    "timeouts": 1_000,
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


def measure(what: str, call: Callable[[], Any], *targets: float) -> None:
    """Print the median time of some calls, in milliseconds."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    judge(f"{what}, ms", times, *targets)


def report(engine: Engine) -> None:
    """Print the time of each part."""
    locks = sl.Locks(engine)
    print(f"{locks.engine_name}", flush=True)
    shown = [row["id"] for row in overview.semaphores(locks, 50).rows or () if not row["on_demand"]]
    parts: dict[str, Callable[[sl.Locks], Any]] = {
        "semaphores": lambda locks: overview.semaphores(locks, 50),
        "holders": overview.holders(10, shown),
        "ages": overview.ages,
        "queues": overview.queue_counts,
        "completed": overview.completed,
        "mutexes": lambda locks: overview.mutexes(locks, 100),
        "timeouts": lambda locks: overview.timeouts(locks, 50),
        "maintenance": overview.maintenance,
        "keys": overview.keys,
        "changes": overview.changes,
    }
    for name, read in parts.items():
        measure(name, lambda read=read: overview.read_part(locks, read))  # type: ignore[misc]
    measure("engine and schema", lambda: queries.facts(locks))
    measure("queries of the page", lambda: queries.read_all(locks))
    with served(locks) as address, httpx.Client(timeout=60) as client:
        measure("page", lambda: client.get(f"{address}live").raise_for_status(), MUST, AIM)
    database = Database(engine)
    measure("status", lambda: read_status(database, 20), MUST, AIM)


def main() -> None:
    """Run the command line."""
    every = ("sqlite", "postgresql15", "mysql", "mariadb")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page")
    parser.add_argument("engines", nargs="*", choices=[*every, []], metavar="engine")
    for name in parser.parse_args().engines or every:
        with database(name) as engine:
            crowd(engine, **ROWS)
            report(engine)


if __name__ == "__main__":
    main()

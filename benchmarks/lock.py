"""The cost of a lock, compared with plain SQLAlchemy Core and sqlalchemy-dlock, on PostgreSQL.

    make bench ONLY='lock[:postgresql+psycopg://user:password@host/database]'

Without a URL a durable server is started (see tests/servers) and pinned, with this process, to one processor: on two,
the speed of the same operation varies. With a URL, the database ``locks_benchmark`` is made there and dropped.

Every figure is a ratio within one run, the median of alternating rounds; only such ratios are comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import URL, Engine, bindparam, create_engine, event, func, make_url, select, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from sqlalchemy_dlock import create_sadlock

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
from sqlalchemy_locks.alembic.steps import STEPS

from .report import durable, judge
from .wire import Wire

DATABASE = "locks_benchmark"
KEY = 4711
ROUNDS = 21
PAIRS = 300
WORK = text("SELECT 1")
#: what an app would write itself
CORE = select(func.pg_advisory_xact_lock(bindparam("key")))
IMPORTS = 15

Pair = Callable[[], object]


@dataclass(frozen=True)
class Target:
    """A target: the largest allowed ratio (must), and the desired one (aim)."""

    what: str
    of: str
    against: str
    must: float | None
    aim: float | None


TARGETS = (
    Target("with locks.exclusive() / the block in plain Core", "locks", "core", 1.4, 1.1),
    Target("a statement in held.session / the block in plain Core with it", "session", "core, work", 1.8, 1.4),
    Target("with locks.exclusive() / sqlalchemy-dlock", "locks", "dlock", 0.7, 0.5),
    Target("with a statement listener / without", "listener", "locks", None, None),
    Target("work in held.session / in an own session with the lock", "session", "own session", None, None),
)


def engine_at(url: URL, synchronous_commit: str) -> Engine:
    """Make an engine like an app's."""
    return create_engine(url, connect_args={"options": f"-c synchronous_commit={synchronous_commit}"})


@contextlib.contextmanager
def variants(url: URL, synchronous_commit: str) -> Iterator[dict[str, Pair]]:
    """Yield the variants of acquiring and releasing a lock, connected and warmed up."""
    engine = engine_at(url, synchronous_commit)
    watched = engine_at(url, synchronous_commit)
    event.listen(watched, "before_cursor_execute", lambda *_: None)
    locks, listened = sl.Locks(engine), sl.Locks(watched)

    def core() -> None:
        with engine.begin() as connection:
            connection.execute(CORE, {"key": KEY})

    def core_with_work() -> None:
        with engine.begin() as connection:
            connection.execute(CORE, {"key": KEY})
            connection.execute(WORK)

    def with_locks() -> None:
        with locks.exclusive(KEY):
            pass

    def dlock() -> None:
        with engine.connect() as connection, create_sadlock(connection, KEY):
            pass

    def with_listener() -> None:
        with listened.exclusive(KEY):
            pass

    def session() -> None:
        with locks.exclusive(KEY) as lock:
            lock.session.execute(WORK)

    def own_session() -> None:
        with Session(engine) as own, own.begin():
            own.execute(sl.lock.exclusive(KEY))
            own.execute(WORK)

    pairs: dict[str, Pair] = {
        "core": core,
        "core, work": core_with_work,
        "locks": with_locks,
        "dlock": dlock,
        "listener": with_listener,
        "session": session,
        "own session": own_session,
    }
    for pair in pairs.values():
        for _ in range(20):  # psycopg prepares a statement at its sixth execution
            pair()
    yield pairs
    engine.dispose()
    watched.dispose()


def microseconds(pair: Pair) -> float:
    """Return the mean time of a pair in one round."""
    started = time.perf_counter()
    for _ in range(PAIRS):
        pair()
    return (time.perf_counter() - started) / PAIRS * 1e6


def measured(pairs: dict[str, Pair]) -> dict[str, list[float]]:
    """Time each variant in alternating rounds, so that noise affects all of them."""
    rounds: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(ROUNDS):
        for name, pair in pairs.items():
            rounds[name].append(microseconds(pair))
    return rounds


def report_ratios(url: URL, synchronous_commit: str) -> None:
    """Print each variant's time and the ratios."""
    print(f"\nLock and unlock, synchronous_commit {synchronous_commit}")
    with variants(url, synchronous_commit) as pairs:
        rounds = measured(pairs)
    for name, times in rounds.items():
        print(f"  {name:11} {statistics.median(times):7.0f} µs")
    for target in TARGETS:
        ratios = [a / b for a, b in zip(rounds[target.of], rounds[target.against], strict=True)]
        judge(target.what, ratios, target.must, target.aim)


def report_round_trips(url: URL) -> None:
    """Print the round trips of each variant and each operation."""
    assert url.host is not None
    wire = Wire(url.host, url.port or 5432)
    proxied = url.set(host="127.0.0.1", port=wire.port)
    engine = engine_at(proxied, "off")
    locks = sl.Locks(engine)

    def count(pair: Pair, name: str) -> None:
        for _ in range(10):
            pair()
        before = wire.round_trips
        for _ in range(10):
            pair()
        judge(name, (wire.round_trips - before) / 10)

    def with_timeout() -> None:
        with locks.exclusive(KEY, timeout=5):
            pass

    print("\nRound trips, counted on the wire")
    with variants(proxied, "off") as pairs:
        for name, pair in pairs.items():
            count(pair, f"{name}: lock and unlock")
    count(with_timeout, "locks: lock and unlock, with a timeout")
    count(lambda: locks.run(sl.lock.vacuum()), "locks.run() of one statement")
    with engine.connect() as connection, connection.begin():
        for make in (sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared, sl.lock.unlock):
            count(partial(connection.execute, make(KEY)), f"lock.{make.__name__} in a transaction")
        bounded = sl.lock.exclusive(KEY).execution_options(locks_wait=5)
        count(partial(connection.execute, bounded), "lock.exclusive with locks_wait")
    engine.dispose()
    wire.close()


def report_imports() -> None:
    """Print the import time of this library and of SQLAlchemy alone, each in a new process."""
    script = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"
    names = ("sqlalchemy", "sqlalchemy.orm", "sqlalchemy_locks")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(IMPORTS):
        for name in names:
            done = subprocess.run(
                [sys.executable, "-c", script.format(name)], check=True, capture_output=True, text=True
            )
            times[name].append(float(done.stdout))
    print("\nImports")
    for name in names:
        print(f"  {name:17} {statistics.median(times[name]) * 1e3:4.0f} ms")
    for against, must, aim in (("sqlalchemy", 1.3, 1.1), ("sqlalchemy.orm", None, None)):
        ratios = [a / b for a, b in zip(times["sqlalchemy_locks"], times[against], strict=True)]
        judge(f"import sqlalchemy_locks / {against}", ratios, must, aim)


@contextlib.contextmanager
def database(server: URL) -> Iterator[URL]:
    """Create a database with the default installation, and drop it."""
    administrator = create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with administrator.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {DATABASE}")
    url = server.set(database=DATABASE)
    try:
        engine = create_engine(url, poolclass=NullPool)
        with engine.begin() as connection:
            operations = Operations(MigrationContext.configure(connection))
            operations.upgrade_locks(from_="base", to=STEPS[-1])  # type: ignore[attr-defined]
        yield url
    finally:
        with administrator.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {DATABASE}")


@contextlib.contextmanager
def a_server() -> Iterator[URL]:
    """Start a PostgreSQL server on the same processor as this process."""
    with durable("postgresql15") as server:
        yield make_url(server.url("psycopg"))


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lock", description=__doc__.splitlines()[0])
    parser.add_argument(
        "url", nargs="?", type=make_url, help="postgresql+psycopg://...; without it, a server is started"
    )
    given: URL | None = parser.parse_args().url
    report_imports()
    with contextlib.nullcontext(given) if given is not None else a_server() as server, database(server) as url:
        report_round_trips(url)
        for synchronous_commit in ("off", "on"):
            report_ratios(url, synchronous_commit)


if __name__ == "__main__":
    main()

"""The cost of a mutex, compared with the same statements in plain SQLAlchemy Core, on PostgreSQL, MySQL and MariaDB.

    make bench ONLY='mutex[:postgresql15|mysql|mariadb]'

Servers are started (see tests/servers), one after the other, and pinned, with this process, to one processor: on
two, the speed of the same operation varies.

A pair is an acquire and a release. Core is what an app would write itself, ``UPDATE ... SET acquired = true WHERE ...
AND acquired != true``, prebuilt: in ``engine.begin()``, or on an engine in AUTOCOMMIT. Ours also stores owner, nonce,
fence and timestamp in the row. Every figure is a ratio within one run, the median of alternating rounds; only such
ratios are comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import URL, Engine, bindparam, create_engine, make_url, update
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
from sqlalchemy_locks.alembic.steps import STEPS
from sqlalchemy_locks.sql.tables import tables

from .lock import Pair, Target
from .report import durable, judge
from .wire import Wire

DATABASE = "mutex_benchmark"
DRIVERS = {"postgresql15": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}
ROUNDS = 21
PAIRS = 200

#: runs a pair n times
Repeated = Callable[[int], None]
Variants = dict[str, Repeated]

BEGUN = Target("locks.mutex pair / plain Core, begin()", "locks", "core, begin()", 0.9, 0.75)
AUTOCOMMITTED = Target("locks.mutex pair / plain Core, AUTOCOMMIT", "locks", "core, AUTOCOMMIT", 1.1, 0.9)
OFF: tuple[Target, ...] = (
    BEGUN,
    AUTOCOMMITTED,
    Target("async façade, asyncpg / sync façade, psycopg", "async", "locks", 1.5, 1.2),
    Target("acquire_token and release / acquire and release", "locks, token", "locks", None, None),
    Target("own class by a session, begin() / plain Core, begin()", "session", "core, begin()", None, None),
    Target("once_per / locks.mutex pair", "once_per", "locks", None, None),
)
ON: tuple[Target, ...] = (BEGUN, AUTOCOMMITTED)
#: MySQL and MariaDB: the targets are for PostgreSQL
OTHERS = tuple(Target(each.what, each.of, each.against, None, None) for each in ON)


class Base(DeclarativeBase):
    pass


class Import(Base):
    """A model with its own columns for a mutex."""

    __tablename__ = "import"
    name: Mapped[str] = mapped_column(primary_key=True)
    locked: Mapped[bool]


def repeated(pair: Pair) -> Repeated:
    """Make a function that repeats a pair."""

    def run(times: int) -> None:
        for _ in range(times):
            pair()

    return run


def awaited(loop: asyncio.AbstractEventLoop, pair: Callable[[], Coroutine[Any, Any, object]]) -> Repeated:
    """The same for a coroutine function, in one run of its loop."""

    async def run(times: int) -> None:
        for _ in range(times):
            await pair()

    return lambda times: loop.run_until_complete(run(times))


def pairs_of(engine: Engine) -> dict[str, Pair]:
    """Return an acquire and release in each synchronous way."""
    locks = sl.Locks(engine)
    postgresql = engine.dialect.name == "postgresql"
    locks.run(sl.Mutex().create("core", "locks", "locks, token"))
    state = (tables("lock", "") if postgresql else tables(None, "lock_")).task_state
    chosen = update(state).where(state.c.queue_id == "default", state.c.id == bindparam("task"))
    acquire = chosen.where(state.c.acquired.is_not(True)).values(acquired=True)
    release = chosen.where(state.c.acquired.is_not(False)).values(acquired=False)
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")

    def in_transactions() -> None:
        for statement in (acquire, release):
            with engine.begin() as connection:
                assert connection.execute(statement, {"task": "core"}).rowcount == 1

    def in_autocommit() -> None:
        for statement in (acquire, release):
            with autocommit.connect() as connection:
                assert connection.execute(statement, {"task": "core"}).rowcount == 1

    def locks_pair() -> None:
        assert locks.mutex.acquire("locks")
        assert locks.mutex.release("locks")

    def token_pair() -> None:
        assert locks.mutex.acquire_token("locks, token")
        assert locks.mutex.release("locks, token")

    pairs: dict[str, Pair] = {"core, begin()": in_transactions, "core, AUTOCOMMIT": in_autocommit, "locks": locks_pair}
    return {**pairs, "locks, token": token_pair} if postgresql else pairs


def others_of(engine: Engine) -> dict[str, Pair]:
    """Further pairs: a model's own columns in a session, and a timeout."""
    Base.metadata.create_all(engine)
    mutex, locks = sl.Mutex(Import, id=Import.name, acquired=Import.locked), sl.Locks(engine)
    locks.run(mutex.create("own"))

    def session_pair() -> None:
        with Session(engine) as session:
            with session.begin():
                assert session.scalar(mutex.acquire("own"))
            with session.begin():
                assert session.scalar(mutex.release("own"))

    def once() -> None:
        locks.once_per("once", every=3600)

    return {"session": session_pair, "once_per": once}


@contextlib.contextmanager
def variants(url: URL, options: dict[str, Any], asynchronous: bool) -> Iterator[Variants]:
    """Yield the variants, connected and warmed up."""
    engine = create_engine(url, connect_args=options)
    ways = {name: repeated(pair) for name, pair in pairs_of(engine).items()}
    with contextlib.ExitStack() as stack:
        if asynchronous:
            ways |= {name: repeated(pair) for name, pair in others_of(engine).items()}
            ways["async"] = stack.enter_context(asynchronously(url))
        for way in ways.values():
            way(20)  # psycopg prepares a statement at its sixth execution
        yield ways
    engine.dispose()


@contextlib.contextmanager
def asynchronously(url: URL) -> Iterator[Repeated]:
    """``AsyncLocks`` by asyncpg."""
    settings = {"server_settings": {"synchronous_commit": "off"}}
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"), connect_args=settings)
    locks = sl.AsyncLocks(engine)
    loop = asyncio.new_event_loop()

    async def pair() -> None:
        assert await locks.mutex.acquire("async")
        assert await locks.mutex.release("async")

    try:
        yield awaited(loop, pair)
    finally:
        loop.run_until_complete(engine.dispose())
        loop.close()


def report_ratios(title: str, url: URL, options: dict[str, Any], targets: tuple[Target, ...]) -> None:
    """Print each variant's time and the ratios."""
    print(f"\n{title}, {PAIRS} pairs a round, {ROUNDS} rounds", flush=True)
    with variants(url, options, targets is OFF) as ways:
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():  # alternating, so that noise affects all of them
                started = time.perf_counter()
                way(PAIRS)
                rounds[name].append((time.perf_counter() - started) / PAIRS * 1e6)
    for name, times in rounds.items():
        print(f"  {name:16} {statistics.median(times):7.0f} µs")
    for target in targets:
        ratios = [a / b for a, b in zip(rounds[target.of], rounds[target.against], strict=True)]
        judge(target.what, ratios, target.must, target.aim)


def report_round_trips(url: URL, must: int | None) -> None:
    """Print the round trips of each operation."""
    assert url.host is not None
    assert url.port is not None
    wire = Wire(url.host, url.port)
    engine = create_engine(url.set(host="127.0.0.1", port=wire.port))
    locks, mutex, timeout = sl.Locks(engine), sl.Mutex(), sl.Timeout(every=3600)
    locks.run(mutex.create("one"))
    locks.run(timeout.create("one"))

    def count(name: str, does: Pair, undoes: Pair = lambda: None) -> None:
        trips = []
        for _ in range(10):
            before = wire.round_trips
            does()
            trips.append(wire.round_trips - before)
            undoes()
        judge(f"{name}, round trips", statistics.median(trips), must, must)

    print("\nRound trips of an operation, counted on the wire")
    count("locks.mutex.acquire", lambda: locks.mutex.acquire("one"), lambda: locks.mutex.release("one"))
    locks.mutex.acquire("one")
    count("locks.mutex.release", lambda: locks.mutex.release("one"), lambda: locks.mutex.acquire("one"))
    locks.mutex.release("one")
    count("locks.mutex.acquire_token", lambda: locks.mutex.acquire_token("one"), lambda: locks.mutex.release("one"))
    with engine.connect() as connection, connection.begin():
        acquire, release = mutex.acquire("one"), mutex.release("one")
        for name, made, other in (("acquire", acquire, release), ("release", release, acquire)):
            connection.execute(other)
            count(
                f"mutex.{name} in a transaction", partial(connection.execute, made), partial(connection.execute, other)
            )
    past = iter(range(10**6, 10**9, 3601))
    moved = sl.Timeout(every=3600, clock=lambda: next(past))
    with engine.connect() as connection, connection.begin():
        count("timeout.acquire in a transaction", lambda: connection.execute(moved.acquire("one")))
    engine.dispose()
    wire.close()


@contextlib.contextmanager
def database(name: str) -> Iterator[URL]:
    """Start a server on the same processor as this process, and install the tables."""
    with durable(name) as server:
        server.create_database(DATABASE)
        url = make_url(server.url(DRIVERS[name], DATABASE))
        engine = create_engine(url, poolclass=NullPool)
        with engine.begin() as connection:
            operations = Operations(MigrationContext.configure(connection))
            operations.upgrade_locks(from_="base", to=STEPS[-1])  # type: ignore[attr-defined]
        yield url


def flushing(url: URL, flush: int) -> None:
    """Make the server flush at each commit (1, the default), or once a second (2)."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET GLOBAL innodb_flush_log_at_trx_commit = {flush}")


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutex", description=__doc__.splitlines()[0])
    parser.add_argument("server", nargs="?", choices=list(DRIVERS), help="which; all of them without")
    asked: str | None = parser.parse_args().server
    for name in [asked] if asked else DRIVERS:
        with database(name) as url:
            print(f"\n{name}")
            report_round_trips(url, 1 if name == "postgresql15" else None)
            if name == "postgresql15":
                for commit, held_to in (("off", OFF), ("on", ON)):
                    options = {"options": f"-c synchronous_commit={commit}"}
                    report_ratios(f"Mutex, synchronous_commit {commit}", url, options, held_to)
            else:
                for flush in (2, 1):
                    flushing(url, flush)
                    report_ratios(f"Mutex, innodb_flush_log_at_trx_commit {flush}, {name}", url, {}, OTHERS)


if __name__ == "__main__":
    main()

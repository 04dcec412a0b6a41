"""The cost of a mutex, compared with the raw driver: psycopg 3, asyncpg, and pymysql on MySQL and MariaDB.

    make bench ONLY='mutex[:postgresql15|mysql|mariadb]'

Servers are started (see tests/servers), one after the other, and pinned, with this process, to one processor: on
two, the speed of the same operation varies.

A pair is an acquire and a release. Raw is the pattern's own statement, ``UPDATE ... SET acquired = true WHERE ... AND
acquired != true``, prepared, in autocommit; ours also stores owner, nonce, fence and timestamp in the row, and "raw,
our SQL" is the driver's time for that. Every figure is a ratio within one run, the median of alternating rounds;
only such ratios are comparable.
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
from sqlalchemy import URL, Connection, Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
from sqlalchemy_locks.alembic.steps import STEPS

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

HELD = ("mutex pair, held connection / raw", "held", "raw")
OFF: tuple[Target, ...] = (
    Target(*HELD, 2.0, 1.25),
    Target("locks.mutex pair / raw", "locks", "raw", 2.7, 1.8),
    Target("held connection / raw, our SQL", "held", "raw, our SQL", None, None),
    Target("locks.mutex / raw, our SQL", "locks", "raw, our SQL", None, None),
    Target("acquire_token and release / acquire and release", "locks, token", "locks", None, None),
    Target("own class by a session, begin() / raw", "session", "raw", None, None),
    Target("once_per / raw acquire and release", "once_per", "raw", None, None),
    Target("async façade, asyncpg / sync façade, psycopg", "async", "locks", 1.5, 1.1),
)
ON: tuple[Target, ...] = (Target(*HELD, None, None), Target("locks.mutex pair / raw", "locks", "raw", 1.6, 1.2))
FLUSHED = (Target(*HELD, 1.8, 1.2), Target("locks.mutex pair / raw", "locks", "raw", 1.8, 1.2))
UNFLUSHED = tuple(Target(each.what, each.of, each.against, None, None) for each in FLUSHED)


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


def raw_statements(table: str) -> tuple[str, str]:
    """Return the two statements of the pattern."""
    where = "WHERE queue_id = 'default' AND id = %s AND acquired !="
    return (
        f"UPDATE {table} SET acquired = true {where} true",
        f"UPDATE {table} SET acquired = false {where} false",
    )


def our_statements(engine: Engine) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return the SQL of our operations, for the raw driver."""
    mutex = sl.Mutex()
    compiled = [made.compile(dialect=engine.dialect) for made in (mutex.acquire("ours"), mutex.release("ours"))]
    return tuple((each.string, {**each.params, "locks_nonce": "0" * 32}) for each in compiled)


@contextlib.contextmanager
def raw(url: URL, options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a raw connection in autocommit, and the fastest way to execute a statement on it."""
    module: Any = create_engine(url).dialect.import_dbapi()
    names = ("host", "port", "user", "password", "dbname" if url.get_backend_name() == "postgresql" else "database")
    given = (url.host, url.port, url.username, url.password, url.database)
    arguments = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    connection = module.connect(**arguments, **options, autocommit=True)
    cursor = connection.cursor()
    try:
        yield connection, cursor.execute
    finally:
        connection.close()


def pairs_of(engine: Engine, held: Connection, execute: Any) -> dict[str, Pair]:
    """Yield an acquire and release in each synchronous way."""
    mutex, locks = sl.Mutex(), sl.Locks(engine)
    locks.run(mutex.create("raw", "ours", "held"))
    postgresql = engine.dialect.name == "postgresql"
    taken, freed = raw_statements("lock.task_state" if postgresql else "lock_task_state")

    def raw_pair() -> None:
        execute(taken, ("raw",))
        execute(freed, ("raw",))

    def held_pair() -> None:
        assert held.scalar(mutex.acquire("held"))
        assert held.scalar(mutex.release("held"))

    def locks_pair() -> None:
        assert locks.mutex.acquire("locks")
        assert locks.mutex.release("locks")

    pairs: dict[str, Pair] = {"raw": raw_pair, "held": held_pair, "locks": locks_pair}
    if not postgresql:
        return pairs
    acquire, release = our_statements(engine)
    nonces = iter(range(10**9))

    def ours_pair() -> None:
        execute(acquire[0], {**acquire[1], "locks_nonce": f"{next(nonces):032}"})
        execute(release[0], release[1])

    def token_pair() -> None:
        assert locks.mutex.acquire_token("locks, token")
        assert locks.mutex.release("locks, token")

    return {**pairs, "raw, our SQL": ours_pair, "locks, token": token_pair}


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
    with raw(url, options) as (_, execute), engine.connect() as plain:
        held = plain.execution_options(isolation_level="AUTOCOMMIT")
        ways = {name: repeated(pair) for name, pair in pairs_of(engine, held, execute).items()}
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
        print(f"  {name:14} {statistics.median(times):7.0f} µs")
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
                for flush, targets in ((2, UNFLUSHED), (1, FLUSHED)):
                    flushing(url, flush)
                    report_ratios(f"Mutex, innodb_flush_log_at_trx_commit {flush}", url, {}, targets)


if __name__ == "__main__":
    main()

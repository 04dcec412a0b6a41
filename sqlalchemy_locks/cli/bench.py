"""``bench``: what an operation costs here, beside the raw driver."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import click
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import CompileError, DBAPIError

from .. import lock, semaphore
from ..dialects import engine_of
from ..locks import Locks
from ..mutex import Mutex
from ..operation import Operation
from ..waiting import PATIENCE
from .command import on_database
from .screen import Screen, name, note, table
from .target import Database, Target
from .wire import Wire

#: what it calls its mutex, its key and its semaphore
_NAME = "sqlalchemy-locks bench"

Twice = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A pair of operations, and the same statements by the driver alone, where they are one each."""

    name: str
    ours: Callable[[Locks], Twice]
    statements: tuple[Operation[Any], ...]
    #: in a transaction of its own
    begins: bool = False


def _mutex(locks: Locks) -> Twice:
    def pair() -> None:
        locks.mutex.acquire(_NAME, queue=_NAME)
        locks.mutex.release(_NAME, queue=_NAME)

    return pair


def _exclusive(locks: Locks) -> Twice:
    def pair() -> None:
        with locks.exclusive(_NAME):
            pass

    return pair


def _permits(locks: Locks) -> Twice:
    def pair() -> None:
        locks.release(locks.acquire({_NAME: 1}, ttl=60))

    return pair


_MUTEX = (Mutex().acquire(_NAME, queue=_NAME), Mutex().release(_NAME, queue=_NAME))
_SEMAPHORE = (semaphore.acquire({_NAME: 1}, external_id=_NAME, ttl=60), semaphore.release(_NAME))
CASES = (
    Case("mutex: acquire, release", _mutex, _MUTEX),
    Case("exclusive: begin, lock, commit", _exclusive, (lock.exclusive(_NAME),), begins=True),
    Case("semaphore: acquire, release", _permits, _SEMAPHORE),
)


@click.command(short_help="Measure what locks cost here.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Rounds, which take turns.")
@click.option("--pairs", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Pairs in each round.")
@on_database()
def bench(screen: Screen, database: Database, rounds: int, pairs: int) -> None:
    """Measure what locks cost on this database, from this machine.

    Each figure is the median of rounds that take turns, so that what else the machine does falls on all alike; the
    ratios say more than the microseconds. Raw is the driver alone, on a connection that is held, with the very
    statements that the operation consists of; – stands where it consists of more than one. Round trips are counted on
    the wire, through a proxy, apart from the times.

    It writes: a mutex and a semaphore of its own, which stay behind as a row each, and requests that the clean-up
    deletes as it does others.
    """
    if database.target.url.get_dialect().is_async:
        drivername = database.target.url.drivername
        raise click.UsageError(f"The raw driver is measured synchronously, and {drivername} is not: name another.")
    locks = Locks(database.engine)
    locks.run(semaphore.create(_NAME, 1, by=_NAME))
    with contextlib.ExitStack() as open_:
        ours = {case.name: case.ours(locks) for case in CASES}
        raw = {case.name: open_.enter_context(_raw(database, case)) for case in CASES}
        with screen.progress("Measuring", rounds) as advance:
            times = _timed(ours, raw, rounds, pairs, advance)
        trips = _round_trips(database.target)
    locks.run(semaphore.delete(_NAME, by=_NAME))
    rows = [_row(case, times, trips) for case in CASES]
    settings = {"database": database.target.shown, "rounds": rounds, "pairs": pairs}
    screen.show({**settings, "results": rows}, _table(rows), note("Medians; a pair is both operations together."))


def _timed(
    ours: dict[str, Twice], raw: dict[str, Twice | None], rounds: int, pairs: int, advance: Callable[[int], None]
) -> dict[tuple[str, str], float]:
    """Microseconds of each pair."""
    variants = {("ours", case): pair for case, pair in ours.items()}
    variants |= {("raw", case): pair for case, pair in raw.items() if pair is not None}
    found: dict[tuple[str, str], list[float]] = {variant: [] for variant in variants}
    for pair in variants.values():
        pair()  # connections are made, statements prepared
    for _ in range(rounds):
        for variant, pair in variants.items():
            began = time.perf_counter()
            for _ in range(pairs):
                pair()
            found[variant].append((time.perf_counter() - began) / pairs * 1e6)
        advance(1)
    return {variant: statistics.median(each) for variant, each in found.items()}


@contextlib.contextmanager
def _raw(database: Database, case: Case) -> Iterator[Twice | None]:
    """The driver's own cursor, on a connection of its own; ``None`` where there is nothing to compare."""
    try:
        spelt = [_spelt(operation.compile(dialect=database.engine.dialect)) for operation in case.statements]
    except CompileError:
        spelt = []
    if not spelt or database.engine.get_execution_options():
        yield None
        return
    engine = create_engine(database.target.url, isolation_level=None if case.begins else "AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            driver: Any = connection.connection
            cursor = driver.cursor()

            def pair() -> None:
                ident = uuid4().hex
                for sql, values in spelt:
                    cursor.execute(sql, values(ident))
                if case.begins:
                    driver.commit()

            yield pair
            cursor.close()
    finally:
        engine.dispose()


def _spelt(compiled: Any) -> tuple[str, Callable[[str], Any]]:
    """A statement, and its values in a pair that is known by an id: the same ones that ``Locks`` gives it."""
    given, order = dict(compiled.params), compiled.positiontup if compiled.positional else None
    if "lock_wait" in given:
        given["lock_wait"] = engine_of(compiled.dialect).wait_value(PATIENCE)
    own = given.keys() & {"locks_nonce", "external_id"}

    def values(ident: str) -> Any:
        each = {**given, **dict.fromkeys(own, ident)}
        return each if order is None else tuple(each[name] for name in order)

    return compiled.string, values


def _round_trips(target: Target) -> dict[str, int]:
    """Of a second pair of each, by TCP; none where the server is reached in another way."""
    url = target.url
    if url.host is None or url.host.startswith("/") or url.port is None:
        return {}
    wire = Wire(url.host, url.port)
    engine = create_engine(url.set(host="127.0.0.1", port=wire.port))
    try:
        return {case.name: _trips(case.ours(_placed(engine, target)), wire) for case in CASES}
    except DBAPIError:
        return {}  # a certificate that isn't for this machine
    finally:
        engine.dispose()
        wire.close()


def _placed(engine: Engine, target: Target) -> Locks:
    return Locks(target.placed(engine))


def _trips(pair: Twice, wire: Wire) -> int:
    pair()
    before = wire.round_trips
    pair()
    return wire.round_trips - before


def _row(case: Case, times: dict[tuple[str, str], float], trips: dict[str, int]) -> dict[str, Any]:
    ours, raw = times["ours", case.name], times.get(("raw", case.name))
    return {
        "pair": case.name,
        "microseconds": round(ours, 1),
        "raw_microseconds": None if raw is None else round(raw, 1),
        "ratio": None if raw is None else round(ours / raw, 2),
        "round_trips": trips.get(case.name),
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    numbers = ("µs a pair", "Raw driver", "Ratio", "Round trips")
    shown = table("Pair", *numbers, right=numbers)
    for row in rows:
        raw = None if row["raw_microseconds"] is None else f"{row['raw_microseconds']:,.0f}"
        cells = [name(f"{row['microseconds']:,.0f}"), name(raw), name(row["ratio"]), name(row["round_trips"])]
        shown.add_row(row["pair"], *cells)
    return shown

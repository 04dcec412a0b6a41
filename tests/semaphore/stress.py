"""Sixteen processes that want permits: ``python -m tests.semaphore.stress URL FILE NAMES...``.

Two of them are killed while they hold something, and swept by their owner. Prints how many requests that were, and how often something was had.

What it holds it writes into a file that all of them map: after a grant has come, and before it gives it back. So the
sum over all processes is never more than what is held in truth, and where it exceeds a capacity, so did they.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for

from .parties import place

PROCESSES = 16
CAPACITIES = (3, 5, 8)
KILLED = (3, 11)
TURNS = 100
LONGEST = 45.0
T = TypeVar("T")
_LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Witness:
    """How many permits each process holds of each semaphore, as far as it knows itself."""

    def __init__(self, path: Path) -> None:
        # and in the end, how often something was had
        self._size = 8 * (PROCESSES * len(CAPACITIES) + 1)
        if not path.exists():
            path.write_bytes(b"\0" * self._size)
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), self._size)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def add(self, process: int, permits: Mapping[int, int], sign: int) -> None:
        """Note what was had, or will be given back; fail when that is more than there is."""
        with self._alone():
            table = list(struct.unpack(f"{self._size // 8}q", self._map[:]))
            table[-1] += sign > 0
            for semaphore, count in permits.items():
                table[process * len(CAPACITIES) + semaphore] += sign * count
            self._map[:] = struct.pack(f"{self._size // 8}q", *table)
            for semaphore, capacity in enumerate(CAPACITIES):
                held = sum(table[semaphore : -1 : len(CAPACITIES)])
                assert held <= capacity, f"{held} permits of {capacity} are held: {table}"

    def had(self) -> int:
        """How often something was had."""
        with self._alone():
            count: int = struct.unpack(f"{self._size // 8}q", self._map[:])[-1]
        return count

    def holds(self, process: int) -> bool:
        """Whether the process holds anything."""
        with self._alone():
            table = struct.unpack(f"{self._size // 8}q", self._map[:])
        return any(table[process * len(CAPACITIES) : (process + 1) * len(CAPACITIES)])

    def forget(self, process: int) -> None:
        """The process is dead."""
        with self._alone():
            table = list(struct.unpack(f"{self._size // 8}q", self._map[:]))
            for semaphore in range(len(CAPACITIES)):
                table[process * len(CAPACITIES) + semaphore] = 0
            self._map[:] = struct.pack(f"{self._size // 8}q", *table)


def granted(engine: Engine, operation: Any, level: str) -> bool:
    """In a transaction of one's own, at some level; whether it is held, whatever went wrong."""
    try:
        with engine.connect().execution_options(isolation_level=level) as connection:
            if random.random() < 0.5:
                # a snapshot; not of our rows, which a SERIALIZABLE read of InnoDB locks, all of them
                connection.execute(text(f"SELECT * FROM {place(engine, 'locked_keys')}")).all()
            grant = connection.scalar(operation)
            if random.random() < 0.1:
                connection.rollback()
                return False
            connection.commit()
            return bool(grant)
    except (sl.LockTimeout, sl.MustRollback):
        return False
    except DBAPIError as error:
        if not backend_for(engine.dialect).transient(error):
            raise
        return False


def turn(engine: Engine, locks: sl.Locks, witness: Witness, number: int, names: list[str]) -> None:
    """Ask for something, hold it, give it back."""
    chosen = random.sample(range(len(names)), random.randint(1, len(names)))
    permits = {semaphore: random.randint(1, 3) for semaphore in chosen}
    asked = {names[semaphore]: count for semaphore, count in permits.items()}
    ident = f"{names[0]}-{number}-{time.monotonic_ns()}"
    if random.random() < 0.5:
        level = random.choice(_LEVELS if engine.dialect.name != "sqlite" else ("SERIALIZABLE",))
        operation = sl.semaphore.acquire(asked, external_id=ident, owner=locks.owner, ttl=600)
        if not granted(engine, operation.execution_options(locks_wait=2), level):
            return
    else:
        try:
            locks.acquire(asked, external_id=ident, ttl=600, timeout=random.choice((0, 0.2)))
        except sl.LockTimeout:
            return
    witness.add(number, permits, 1)
    if random.random() < 0.3:
        assert patiently(lambda: locks.renew(ident))
    witness.add(number, permits, -1)
    assert patiently(lambda: locks.release(ident)) is sl.Released.RELEASED
    if random.random() < 0.3:
        assert patiently(lambda: locks.release(ident)) is sl.Released.ALREADY_RELEASED


def patiently(call: Callable[[], T]) -> T:
    """What it gives; on a machine that stands still for seconds as often as it takes, as the documentation says."""
    while True:
        with contextlib.suppress(sl.LockTimeout):
            return call()


def work(number: int, url: str, file: str, names: list[str]) -> None:
    """One process."""
    random.seed()
    engine = create_engine(url)
    locks = sl.Locks(engine, owner=f"{names[0]}-{number}")
    witness = Witness(Path(file))
    until = time.monotonic() + LONGEST
    while (witness.had() < TURNS and time.monotonic() < until) or number in KILLED:
        turn(engine, locks, witness, number, names)
        with contextlib.suppress(sl.LockTimeout):
            if random.random() < 0.05:
                locks.sweep()
            if random.random() < 0.05:
                locks.run(sl.semaphore.resize(names[2], random.randint(CAPACITIES[2] - 4, CAPACITIES[2])))


def forked(number: int, *arguments: Any) -> int:
    """Start one; whatever goes wrong is on stderr, and its exit status is 1."""
    if pid := os.fork():
        return pid
    try:
        work(number, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def main() -> None:
    url, file, *names = sys.argv[1:]
    witness = Witness(Path(file))
    # forked before there is any connection: importing it all sixteen times would take longer than the test
    processes = [forked(number, url, file, names) for number in range(PROCESSES)]
    for number in KILLED:
        while not witness.holds(number):
            assert os.waitpid(processes[number], os.WNOHANG) == (0, 0), "it has ended before it was killed"
            time.sleep(0.001)
        os.kill(processes[number], signal.SIGKILL)
        os.waitpid(processes[number], 0)
        witness.forget(number)
    engine = create_engine(url)
    dead = {f"{names[0]}-{number}" for number in KILLED}
    swept = patiently(lambda: sl.Locks(engine).sweep(alive=lambda owners: set(owners) - dead))
    engine.dispose()
    ends = [os.waitpid(pid, 0)[1] for number, pid in enumerate(processes) if number not in KILLED]
    print(swept, witness.had())
    sys.exit(max(os.waitstatus_to_exitcode(end) for end in ends))


if __name__ == "__main__":
    main()

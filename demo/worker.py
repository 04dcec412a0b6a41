"""One of the eight processes: an app that uses locks in a loop."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

from sqlalchemy import URL, create_engine

import sqlalchemy_locks as sl

from .database import Invoice
from .witness import Witness

#: acquires the stock exclusively, while the others share it
WRITER = 0
#: is killed while it holds the first invoice
VICTIM = 7


class Signals:
    """Signals between the parent and the workers."""

    def __init__(self, workers: int, context: ForkServerContext) -> None:
        self.ready = context.Barrier(workers + 1)
        self.stop = context.Event()
        self.victim_may_begin = context.Event()
        self.victim_holds = context.Event()


@dataclass(frozen=True)
class Worker:
    """A process. Its changes are in the transaction that holds the lock."""

    number: int
    locks: sl.Locks
    witness: Witness

    def add_position(self, *invoices: str) -> None:
        """Read, wait, write: without the lock, two workers would read the same number."""
        visit = self.witness.visit(self.number, *invoices)
        with self.locks.exclusive(*invoices) as held, visit:
            for name in invoices:
                invoice = held.session.get_one(Invoice, name)
                think(0.005, 0.02)
                invoice.positions += 1
        visit.committed()

    def look_at_stock(self) -> None:
        """Hold a key shared: others can share it, but not hold it exclusively."""
        visit = self.witness.visit(self.number, "stock", shared=True)
        with self.locks.shared("stock"), visit:
            think(0.02, 0.06)
        visit.committed()

    def count_stock(self) -> None:
        """Hold the same key exclusively, in spite of its sharers."""
        visit = self.witness.visit(self.number, "stock")
        with self.locks.exclusive("stock"), visit:
            think(0.005, 0.01)
        visit.committed()

    def hold_until_killed(self, signals: Signals) -> None:
        """Add a position, and never commit."""
        visit = self.witness.visit(self.number, "invoice:1")
        with self.locks.exclusive("invoice:1") as held, visit:
            held.session.get_one(Invoice, "invoice:1").positions += 1000
            held.session.flush()
            signals.victim_holds.set()
            time.sleep(3600)


def think(least: float, most: float) -> None:
    """Wait for a random time."""
    time.sleep(random.uniform(least, most))


def run(number: int, url: URL, witness: Witness, signals: Signals) -> None:
    """Run a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its workers
    engine = create_engine(url)
    worker = Worker(number, sl.Locks(engine), witness)
    # SQLite's waiters poll, and get a turn only if others pause
    pause = 0.3 if url.get_backend_name() == "sqlite" else 0.02
    signals.ready.wait()
    while not signals.stop.is_set():
        if number == WRITER:
            worker.count_stock()
        elif number == VICTIM and signals.victim_may_begin.is_set():
            worker.hold_until_killed(signals)
        else:
            match random.choices(("look", "one", "both"), (6, 5, 1)):
                case ["look"]:
                    worker.look_at_stock()
                case ["one"]:
                    worker.add_position(random.choice(("invoice:1", "invoice:2")))
                case _:
                    worker.add_position("invoice:2", "invoice:1")  # any order: Locks sorts them
        think(0.0, pause)
    engine.dispose()

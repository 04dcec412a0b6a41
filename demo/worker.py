"""One of the eight processes: what an app does with locks, again and again."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext

from sqlalchemy import URL, create_engine

import sqlalchemy_locks as sl

from .database import Invoice
from .witness import Witness

#: Wants the stock for itself, while the others want to share it.
WRITER = 0
#: Is killed while it holds the first invoice.
VICTIM = 7


class Signals:
    """What the parent tells the workers, and they it."""

    def __init__(self, workers: int, context: SpawnContext) -> None:
        self.ready = context.Barrier(workers + 1)
        self.stop = context.Event()
        self.victim_may_begin = context.Event()
        self.victim_holds = context.Event()


@dataclass(frozen=True)
class Worker:
    """One process. Everything it does under a lock, it does in the transaction that holds the lock."""

    number: int
    locks: sl.Locks
    witness: Witness

    def add_position(self, *invoices: str) -> None:
        """Read, think, write: without the lock, two would read the same number."""
        visit = self.witness.visit(self.number, *invoices)
        with self.locks.exclusive(*invoices) as held, visit:
            for name in invoices:
                invoice = held.session.get_one(Invoice, name)
                think(0.005, 0.02)
                invoice.positions += 1
        visit.committed()

    def look_at_stock(self) -> None:
        """Share a key: others may look too, but nobody may count."""
        visit = self.witness.visit(self.number, "stock", shared=True)
        with self.locks.shared("stock"), visit:
            think(0.02, 0.06)
        visit.committed()

    def count_stock(self) -> None:
        """Want the same key alone, among all who share it."""
        visit = self.witness.visit(self.number, "stock")
        with self.locks.exclusive("stock"), visit:
            think(0.005, 0.01)
        visit.committed()

    def hold_until_killed(self, signals: Signals) -> None:
        """Add a position, and never come to the end."""
        visit = self.witness.visit(self.number, "invoice:1")
        with self.locks.exclusive("invoice:1") as held, visit:
            held.session.get_one(Invoice, "invoice:1").positions += 1000
            held.session.flush()
            signals.victim_holds.set()
            time.sleep(3600)


def think(least: float, most: float) -> None:
    """Take a while."""
    time.sleep(random.uniform(least, most))


def run(number: int, url: URL, witness: Witness, signals: Signals) -> None:
    """The whole life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C: it ends its workers itself
    engine = create_engine(url)
    worker = Worker(number, sl.Locks(engine), witness)
    # SQLite's waiters ask again every tenth of a second: they get in only where others leave a gap
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
                    worker.add_position("invoice:2", "invoice:1")  # in any order: they are sorted
        think(0.0, pause)
    engine.dispose()

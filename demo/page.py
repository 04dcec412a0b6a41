"""The end of `make demo`: the page, on the demo's database, with simulated activity."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from sqlalchemy import URL, NullPool, create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.dashboard.serving import served

ELSEWHERE = """\
On a terminal the demo ends with a web page. For a database of yours, serve it with
  sqlalchemy-locks page --url postgresql+psycopg://user:password@localhost/app"""
SEMAPHORES = {"backup-slots": 4, "api-calls": 40, "gpu": 2}
QUEUE = sl.Queue()


def show(console: Console, url: URL) -> None:
    """Serve the page until Ctrl-C; without a terminal, print how to serve it."""
    if not (console.is_terminal and sys.stdin.isatty()) or os.environ.get("CI"):
        console.print(f"\n{ELSEWHERE}", highlight=False)
        return
    locks = sl.Locks(create_engine(url, poolclass=NullPool))
    with activity(locks), served(locks, refresh=2) as address:
        with contextlib.suppress(KeyboardInterrupt):
            console.print(f"\nOpen in a browser: [bold]{address}[/] (Ctrl-C ends it)", highlight=False)
            threading.Event().wait()
    console.print()


@contextlib.contextmanager
def activity(locks: sl.Locks) -> Iterator[None]:
    """Acquire and release permits, put and complete jobs, while the block runs."""
    for name, capacity in SEMAPHORES.items():
        locks.run(sl.semaphore.create(name, capacity, by="make demo"))
    stop = threading.Event()
    parts: list[Callable[[], None]] = [lambda: put(locks, stop), lambda: work(locks, stop)]
    parts += [lambda number=number: hold(locks, stop, f"machine-{number}") for number in range(1, 6)]  # type: ignore[misc]
    threads = [threading.Thread(target=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    try:
        with locks.maintenance():
            yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def hold(locks: sl.Locks, stop: threading.Event, owner: str) -> None:
    """Acquire some permits, keep them for a while, and release them."""
    while not stop.is_set():
        name = random.choice(list(SEMAPHORES))
        count = random.randint(1, 8) if name == "api-calls" else 1
        with contextlib.suppress(sl.LockTimeout):  # looks at `stop` again
            grant = locks.acquire({name: count}, owner=owner, ttl=60, timeout=2)
            stop.wait(random.uniform(2, 12))
            locks.release(grant)


def put(locks: sl.Locks, stop: threading.Event) -> None:
    """Put a few jobs from time to time."""
    while not stop.is_set():
        queue = random.choice(("mail", "mail", "invoices"))
        locks.run(QUEUE.put(*range(random.randint(1, 6)), queue=queue))
        stop.wait(random.uniform(0.5, 2))


def work(locks: sl.Locks, stop: threading.Event) -> None:
    """Process jobs; one in fifty fails."""
    while not stop.is_set():
        for queue in ("mail", "invoices"):
            jobs: list[Any] = locks.run(QUEUE.capture(4, queue=queue, host="machine-1"))
            stop.wait(random.uniform(0.5, 1.5))
            for job in jobs:
                fails = random.random() < 0.02
                locks.run(QUEUE.fail(job, error="no such user", retry=False) if fails else QUEUE.complete(job))

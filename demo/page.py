"""What `make demo` ends with: the page, on the demo's own database, in which something goes on."""

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
There is a page to look at, which this ends with on a terminal. Of a database of yours it is served by
  sqlalchemy-locks page --url postgresql+psycopg://user:password@localhost/app"""
SEMAPHORES = {"backup-slots": 4, "api-calls": 40, "gpu": 2}
QUEUE = sl.Queue()


def show(console: Console, url: URL) -> None:
    """Serve it until Ctrl-C; where nobody could press that, say how it is served."""
    if not (console.is_terminal and sys.stdin.isatty()) or os.environ.get("CI"):
        console.print(f"\n{ELSEWHERE}", highlight=False)
        return
    locks = sl.Locks(create_engine(url, poolclass=NullPool))
    with going_on(locks), served(locks, refresh=2) as address:
        console.print(f"\nLook at it in a browser: [bold]{address}[/] (Ctrl-C ends it)", highlight=False)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    console.print()


@contextlib.contextmanager
def going_on(locks: sl.Locks) -> Iterator[None]:
    """Permits come and go, and jobs, while the block runs."""
    for name, capacity in SEMAPHORES.items():
        locks.run(sl.semaphore.create(name, capacity, by="make demo"))
    over = threading.Event()
    parts: list[Callable[[], None]] = [lambda: put(locks, over), lambda: work(locks, over)]
    parts += [lambda number=number: hold(locks, over, f"machine-{number}") for number in range(1, 6)]  # type: ignore[misc]
    threads = [threading.Thread(target=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    try:
        with locks.maintenance():
            yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def hold(locks: sl.Locks, over: threading.Event, owner: str) -> None:
    """Take some permits, keep them for a while, and give them back."""
    while not over.is_set():
        name = random.choice(list(SEMAPHORES))
        count = random.randint(1, 8) if name == "api-calls" else 1
        grant = locks.acquire({name: count}, owner=owner, ttl=60)
        over.wait(random.uniform(2, 12) if grant else 1)
        if grant:
            locks.release(grant)


def put(locks: sl.Locks, over: threading.Event) -> None:
    """Put a few jobs, now and then."""
    while not over.is_set():
        queue = random.choice(("mail", "mail", "invoices"))
        locks.run(QUEUE.put(*range(random.randint(1, 6)), queue=queue))
        over.wait(random.uniform(0.5, 2))


def work(locks: sl.Locks, over: threading.Event) -> None:
    """Do some of them; one in fifty is beyond help."""
    while not over.is_set():
        for queue in ("mail", "invoices"):
            jobs: list[Any] = locks.run(QUEUE.capture(4, queue=queue, host="machine-1"))
            over.wait(random.uniform(0.5, 1.5))
            for job in jobs:
                hopeless = random.random() < 0.02
                locks.run(QUEUE.fail(job, error="no such user", retry=False) if hopeless else QUEUE.complete(job))

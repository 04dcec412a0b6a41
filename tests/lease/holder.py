"""A process that holds a lease, and does what it is told: one word a line, one line for each answer.

python -m tests.lease.holder URL NAME TTL hold|wait

Who waits is cut off by the server where it is silent for 2 seconds in front of a line. It stops itself at the next pause
between two looks when it is sent SIGUSR1: stopped in the middle of a look, it would read an SQLite database for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from typing import Any

import pytest
from sqlalchemy import create_engine

import sqlalchemy_locks as sl
from tests.operation.fixtures import cut_after


def say(what: object) -> None:
    print(what, flush=True)


def main(url: str, name: str, ttl: str, kind: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on a fork beside threads
    engine = create_engine(url)
    locks = sl.Locks(engine)
    block = locks.lease(name, ttl=float(ttl))
    if kind == "wait":
        cut_after(2, pytest.MonkeyPatch())
        asked: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))

        def pause(seconds: float) -> None:
            if asked:
                asked.clear()
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(seconds)

        locks._sleep = pause
        say("waiting")
    while True:
        try:
            grant = block.__enter__()
            break
        except sl.LockLost:  # so slow was it that its time ran out meanwhile
            continue
    with contextlib.suppress(sl.LockLost), contextlib.ExitStack() as leaving:
        leaving.push(block)
        say(grant.external_id)
        for line in sys.stdin:
            word = line.strip()
            if word == "leave":
                break
            say(told(word, locks, block, grant))
    say("left")


def told(word: str, locks: sl.Locks, block: Any, grant: sl.Lease) -> str:
    if word == "fork":
        return forked(locks, block, grant)
    if word == "lost":
        return str(bool(grant.lost))
    if word == "check":
        try:
            grant.check()
        except sl.LockLost:
            return "lost"
        return "held"
    assert word == "write"
    try:
        locks.run(sl.guarded(DOCUMENT, grant))
    except sl.LockLost:
        return "refused"
    return "written"


def forked(locks: sl.Locks, block: Any, grant: sl.Lease) -> str:
    """What a fork finds, when it has left the block and held a lease of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as answer:
            found = answer.read()
        os.waitpid(child, 0)
        return found
    try:
        found = f"lost {bool(grant.lost)}"
        locks._engine.dispose(close=False)
        block.__exit__(None, None, None)
        with locks.lease("of a fork") as own:
            found += f", its own {bool(own.lost)}"
        os.write(writer, found.encode())
    finally:
        os._exit(0)


def _document() -> Any:
    from .test_block import write

    return write("by the holder")


if __name__ == "__main__":
    DOCUMENT = _document()
    main(*sys.argv[1:])

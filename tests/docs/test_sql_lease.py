"""The SQL that docs/lease.md shows is the SQL that waiters execute."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, event

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.test_sql import plain, spelt_out, statements
from tests.fixtures.parties import later, until
from tests.fixtures.semaphores import polled

BLOCKS = blocks(ROOT / "docs" / "lease.md")


def marked(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.mark.startswith(f"{kind}: ")]


@pytest.mark.parametrize("block", marked("waiting"), ids=lambda block: block.mark)
def test_shown_sql_is_executed_sql(block: Block, servers: Servers) -> None:
    assert waiting(block.mark.removeprefix("waiting: "), servers) == statements(block)


def waiting(name: str, servers: Servers) -> list[str]:
    """Return the statements from the beginning of an attempt, each once."""
    url = servers.fresh(name, PLAIN[name])
    install(url)
    holder, waiter = create_engine(url), create_engine(url)
    try:
        locks, seen = sl.Locks(holder), list[str]()
        locks.run(sl.semaphore.create("exports", 1))
        grant = locks.acquire({"exports": 1})
        event.listen(
            waiter, "before_cursor_execute", lambda *called: seen.append(plain(spelt_out(called[2], called[3])))
        )
        waits = later(sl.Locks(waiter).acquire, {"exports": 1}, timeout=120)
        until(lambda: polled(seen), unless=waits)
        locks.release(grant)
        waits.result(120)
    finally:
        holder.dispose()
        waiter.dispose()
    begin = next(
        place
        for place, statement in enumerate(seen)
        if "sqlalchemy_locks_idle" in statement or "idle_in_transaction" in statement
    )
    return list(dict.fromkeys(seen[begin:]))


def test_pages_have_sql_to_compare() -> None:
    assert marked("waiting")

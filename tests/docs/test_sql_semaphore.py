"""The SQL that docs/semaphore.md and docs/lease.md show is executed SQL; the psql examples run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.test_sql import dialect, executed, plain, spelt_out, statements
from tests.fixtures.parties import PATIENCE, later, until
from tests.fixtures.semaphores import polled

BLOCKS = [*blocks(ROOT / "docs" / "semaphore.md"), *blocks(ROOT / "docs" / "lease.md")]
SHOWN: dict[str, sl.Operation[Any]] = {
    "semaphore.acquire": sl.semaphore.acquire({"backup-slots": 1}, external_id="job-2", owner="web-1"),
    "semaphore.release": sl.semaphore.release("job-1"),
}


def marked(kind: str) -> list[Any]:
    cases = [
        pytest.param(block, engine, *words, id=" ".join((kind, engine, *words)))
        for block in BLOCKS
        if block.mark.startswith(f"{kind}: ")
        for engines, *words in [block.mark.removeprefix(f"{kind}: ").split()]
        for engine in engines.split(",")
    ]
    assert cases, f"no block is marked <!-- {kind}: ... -->"
    return cases


@pytest.mark.parametrize(("block", "engine", "operation"), marked("sql"))
def test_shown_sql_is_compiled_sql(block: Block, engine: str, operation: str) -> None:
    assert plain(str(SHOWN[operation].compile(dialect=dialect(engine)))) == plain(block.text)


@pytest.mark.parametrize(("block", "path"), marked("file"))
def test_shown_sql_is_shipped_sql(block: Block, path: str) -> None:
    assert block.text == (ROOT / "alembic_templates" / "sql" / Path(path)).read_text()


@pytest.mark.parametrize(("block", "name", "operation"), marked("executed"))
def test_shown_sql_is_executed_sql(block: Block, name: str, operation: str, servers: Servers) -> None:
    url = servers.fresh(name, PLAIN[name])
    install(url)
    engine = create_engine(url, isolation_level="READ COMMITTED")
    locks = sl.Locks(engine)
    locks.run(sl.semaphore.create("backup-slots", 10))
    locks.acquire({"backup-slots": 1}, external_id="job-1")
    assert executed(engine, SHOWN[operation]) == statements(block)
    engine.dispose()


@pytest.mark.parametrize(("block", "name"), marked("waiting"))
def test_shown_sql_is_that_of_a_waiter(block: Block, name: str, servers: Servers) -> None:
    """The statements from the beginning of an attempt, each once."""
    url = servers.fresh(name, PLAIN[name])
    install(url)
    holder, waiter, seen = create_engine(url), create_engine(url), list[str]()
    event.listen(waiter, "before_cursor_execute", lambda *called: seen.append(plain(spelt_out(called[2], called[3]))))
    locks = sl.Locks(holder)
    locks.run(sl.semaphore.create("exports", 1))
    grant = locks.acquire({"exports": 1})
    waits = later(sl.Locks(waiter).acquire, {"exports": 1}, timeout=120)
    until(lambda: polled(seen), unless=waits)
    locks.release(grant)
    waits.result(PATIENCE)
    begins = [any(word in statement for word in ("sqlalchemy_locks_idle", "idle_in_transaction")) for statement in seen]
    assert list(dict.fromkeys(seen[begins.index(True) :])) == statements(block)
    holder.dispose()
    waiter.dispose()


def test_psql_examples_run(servers: Servers) -> None:
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    locks = sl.Locks(engine)
    for name in ("backup-slots", "network"):
        locks.run(sl.semaphore.create(name, 2))
    (block,) = [block for block in BLOCKS if block.language == "sql" and not block.mark]
    acquire, renew, release = (line for line in block.text.splitlines() if line)
    with engine.connect() as connection:
        granted = connection.exec_driver_sql(acquire).mappings().one()
        assert (granted["acquired"], granted["semaphores"]) == (True, ["backup-slots", "network"])
        # the same names in another order are the same request, and an empty request is refused
        again = connection.exec_driver_sql(
            acquire.replace("backup-slots,network", "network,backup-slots").replace("1,2", "2,1")
        )
        assert again.mappings().one()["replayed"] is True
        other = connection.exec_driver_sql(acquire.replace("job-9", "job-10")).mappings().one()
        assert (other["acquired"], other["state"], other["exhausted"]) == (False, "DENIED", ["network"])
        unknown = connection.exec_driver_sql(acquire.replace("network", "nothing").replace("job-9", "job-11"))
        assert unknown.mappings().one()["state"] == "UNKNOWN"
        conflict = connection.exec_driver_sql(acquire.replace("1,2", "1,1")).mappings().one()
        assert (conflict["acquired"], conflict["state"]) == (False, "CONFLICT")
        assert connection.exec_driver_sql(renew).scalar() is True
        assert connection.exec_driver_sql(release).scalar() == "RELEASED"
        for nonsense in ("'{}', '{}'", "'{a}', '{0}'", "'{a,b}', '{1}'", "'{a,NULL}', '{1,1}'", "NULL, NULL"):
            with pytest.raises(Exception, match="one count for each name|from 1 to|must not be NULL"):
                connection.exec_driver_sql(f"SELECT lock.semaphore_acquire({nonsense}, 'x')")
    engine.dispose()

"""gevent: many greenlets in one thread hold locks independently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PLAIN, Servers
from tests.examples.served import done
from tests.fixtures.parties import PATIENCE

PATCHED = """
from gevent import monkey
monkey.patch_all()
"""
_BEGIN = """
import contextvars, json, os, time
import gevent
from gevent.event import Event
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
import sqlalchemy_locks as sl

PATIENCE = float(os.environ["PATIENCE"])
options = json.loads(os.environ["OPTIONS"])
engine = create_engine(os.environ["URL"], pool_timeout=PATIENCE, **options)
locks = sl.Locks(engine)
watch = sl.Locks(create_engine(os.environ["URL"], poolclass=NullPool))

def until(true):
    with gevent.Timeout(PATIENCE):
        while not true():
            gevent.sleep(0.13)  # InnoDB refreshes its table of transactions only if it isn't read for a tenth of a second

def tried(block):
    try:
        with block:
            return "entered"
    except sl.LockError as error:
        return type(error).__name__

def told(**values):
    print(json.dumps(values))
"""


def ran(script: str, url: str, folder: Path, *, head: str = PATCHED, **options: Any) -> Any:
    """Run a script in a process patched by gevent, and return what it prints."""
    (folder / "greenlets.py").write_text(head + _BEGIN + script)
    return json.loads(done("python greenlets.py", folder, URL=url, PATIENCE=str(PATIENCE), OPTIONS=json.dumps(options)))


@pytest.mark.parametrize(
    ("engine", "driver"), [("postgresql15", "psycopg"), ("mysql", "pymysql"), ("mariadb", "pymysql")]
)
def test_greenlets_exclude_each_other(engine: str, driver: str, servers: Servers, tmp_path: Path) -> None:
    """Of five, one holds, one waits on a connection, and three in memory: the pool has two connections."""
    script = """
inside, done, may = [], [], Event()
most = 0

def one(number):
    global most
    with locks.exclusive("greenlets") as held:
        inside.append(number)
        most = max(most, len(inside))
        may.wait(PATIENCE)
        held.session.execute(text("SELECT 1"))
        gevent.sleep(0)  # let the others, if they can be let
        inside.remove(number)
        done.append(number)

def waiting():
    with watch._engine.connect() as connection:
        return connection.execute(text(WAITING)).scalar()

WAITING = {
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
}.get(engine.dialect.name, "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    " AND trx_mysql_thread_id IN (SELECT id FROM information_schema.processlist WHERE db = DATABASE())")
first = gevent.spawn(one, 0)
until(lambda: inside)
others = [gevent.spawn(one, number) for number in range(1, 5)]
until(waiting)
held = list(inside)
may.set()
gevent.joinall([first, *others], timeout=PATIENCE, raise_error=True)
told(held=held, most=most, done=done)
"""
    # one connection waits for the server, and the holder of the key uses the other
    told = ran(script, servers.installed(engine, driver), tmp_path, pool_size=2, max_overflow=0)
    assert told == {"held": [0], "most": 1, "done": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize("head", [PATCHED, f"import sqlalchemy_locks{PATCHED}", ""], ids=["patched", "late", "not"])
def test_reentry_is_detected_by_greenlet(head: str, servers: Servers, tmp_path: Path) -> None:
    """Acquiring a lock of another greenlet is no re-entry, even with a copied context."""
    script = """
BLOCKS = {
    "exclusive": lambda patience: locks.exclusive("mine", timeout=patience),
    "lease": lambda patience: locks.lease("mine", timeout=patience),
    "semaphore": lambda patience: locks.semaphore("two", count=2, timeout=patience),
}
locks.run(sl.semaphore.create("two", 2))
found = {}
for name, block in BLOCKS.items():
    with block(PATIENCE):
        # the one would wait for ever, and the other until its time is up
        another = tried, block(0.01)
        spawned = gevent.spawn(contextvars.copy_context().run, *another)
        found[name] = tried(block(PATIENCE)), spawned.get(timeout=PATIENCE)
    found[name] += (tried(block(PATIENCE)),)
told(**found)
"""
    told = ran(script, servers.installed("postgresql15", PLAIN["postgresql15"]), tmp_path, head=head)
    assert told == {key: ["ReentryError", "LockTimeout", "entered"] for key in ("exclusive", "lease", "semaphore")}


def test_greenlet_renews_the_lease(servers: Servers, tmp_path: Path) -> None:
    script = """
RENEWED = text("SELECT renewed_at > created_at FROM lock.permit_request WHERE external_id = :id")

def renewed(grant):
    with watch._engine.connect() as connection:
        return connection.execute(RENEWED, {"id": grant.external_id}).scalar()

with locks.lease("renewed", ttl=3) as grant:
    until(lambda: renewed(grant))
    grant.check()
    told(lost=bool(grant.lost))
"""
    assert ran(script, servers.installed("postgresql15", PLAIN["postgresql15"]), tmp_path) == {"lost": False}

"""The SQL functions, each variant on its server: waits, refusals, and the rows they leave.

Other tests cover what an app sees; these cover what psql and other languages get.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

from sqlalchemy_locks.keys import key
from tests.alembic.project import Fresh, Project, run
from tests.conftest import Servers
from tests.fixtures.parties import PATIENCE, all_of, later

VARIANTS = {
    "advisory": ("postgresql15", "native"),
    "advisory18": ("postgresql18", "native"),
    "table": ("postgresql15", "table"),
    "table18": ("postgresql18", "table"),
    "yugabytedb": ("yugabytedb", "native"),
}
BY_ROWS = ["table", "table18", "yugabytedb"]


TURNS = 60


class Client:
    """One session in one transaction; `later` executes in a thread, which may wait."""

    def __init__(self, url: URL) -> None:
        self._engine = sa.create_engine(url, poolclass=sa.NullPool)
        self._connection = self._engine.connect()
        self._pool = ThreadPoolExecutor(1)
        self._pending: list[Future[Any]] = []
        self.pid = self("SELECT pg_backend_pid()")

    def __call__(self, sql: str) -> Any:
        result = self._connection.exec_driver_sql(sql)
        return result.scalar() if result.returns_rows else None

    def later(self, sql: str) -> Future[Any]:
        self._pending.append(self._pool.submit(self, sql))
        return self._pending[-1]

    @property
    def waiting(self) -> bool:
        return any(not future.done() for future in self._pending)

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()
        self._pool.shutdown()


class World:
    def __init__(self, url: URL) -> None:
        self.url = url
        self.clients: list[Client] = []

    def client(self) -> Client:
        self.clients.append(Client(self.url))
        return self.clients[-1]

    def close(self) -> None:
        """End sessions that a failed test has left waiting for a lock."""
        for client in self.clients:
            if client.waiting:
                run(self.url, f"SELECT pg_terminate_backend({client.pid})")
        for client in self.clients:
            client.close()

    def waits(self, client: Client, future: Future[Any]) -> None:
        """Wait until the server reports that the client waits for a lock."""
        query = f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {client.pid}"
        deadline = time.monotonic() + PATIENCE
        while run(self.url, query) != [("Lock",)]:
            assert not future.done(), future.result()
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(variant: str, fresh: Fresh, tmp_path: Path) -> Iterator[World]:
    server, locking = VARIANTS[variant]
    url = fresh(server, "psycopg")
    Project(tmp_path, url, "directives", locking=locking).upgrade()
    world = World(url)
    yield world
    world.close()


def test_exclusive_waits_for_both_and_shared_for_one(world: World) -> None:
    a, b, c = (world.client() for _ in range(3))
    a("SELECT lock.shared(1)")
    a.commit()
    a("SELECT lock.shared(1)")
    b("SELECT lock.shared(1)")
    waiting = c.later("SELECT lock.exclusive(1)")
    world.waits(c, waiting)
    a.commit()
    world.waits(c, waiting)
    b.commit()
    waiting.result(PATIENCE)
    waiting = a.later("SELECT lock.shared(1)")
    world.waits(a, waiting)
    c.commit()
    waiting.result(PATIENCE)


def test_a_try_never_waits(world: World) -> None:
    """Neither for a holder nor for the uncommitted insert of a new key."""
    a, b = world.client(), world.client()
    for number in (1, 2):
        a(f"SELECT lock.exclusive({number})")
        assert b(f"SELECT lock.try_exclusive({number})") is False
        assert b(f"SELECT lock.try_shared({number})") is False
        b.commit()
        a.commit()
        a(f"SELECT lock.exclusive({number})")
        assert b(f"SELECT lock.try_exclusive({number})") is False
        assert b(f"SELECT lock.try_shared({number})") is False
        assert b("SELECT 1") == 1
        b.commit()
        a.commit()
    assert a("SELECT lock.try_shared(2)") is True
    assert b("SELECT lock.try_shared(2)") is True
    assert b("SELECT lock.try_exclusive(2)") is False
    a.commit()
    assert b("SELECT lock.try_exclusive(2)") is True


def test_a_tried_lock_lasts_until_the_end_of_the_transaction(world: World) -> None:
    """The table variant locks inside an exception block: the lock must outlast the block."""
    a, b = world.client(), world.client()
    for call in ("try_exclusive", "try_shared"):
        assert a(f"SELECT lock.{call}(1)") is True
        assert b("SELECT lock.try_exclusive(1)") is False
        b.commit()
        a.commit()
        assert b("SELECT lock.try_exclusive(1)") is True
        b.commit()


@pytest.mark.parametrize("variant", BY_ROWS, indirect=True)
def test_unlock_leaves_no_second_holder(world: World) -> None:
    """The race: A holds, B waits, A unlocks and commits; B must then really hold it."""
    a, b, c = (world.client() for _ in range(3))
    a("SELECT lock.exclusive(1)")
    a.commit()
    a("SELECT lock.exclusive(1)")
    waiting = b.later("SELECT lock.exclusive(1)")
    world.waits(b, waiting)
    a("SELECT lock.unlock(1)")
    a.commit()
    waiting.result(PATIENCE)
    assert c("SELECT lock.try_exclusive(1)") is False
    third = c.later("SELECT lock.exclusive(1)")
    world.waits(c, third)
    b.commit()
    third.result(PATIENCE)


@pytest.mark.parametrize("variant", BY_ROWS, indirect=True)
def test_vacuum_leaves_no_second_holder(world: World) -> None:
    """The race: vacuum removes the key, uncommitted; B waits for the row; vacuum commits."""
    a, b, c = (world.client() for _ in range(3))
    a("SELECT lock.exclusive(1)")
    a.commit()
    assert a("SELECT lock.vacuum()") == 1
    waiting = b.later("SELECT lock.exclusive(1)")
    world.waits(b, waiting)
    a.commit()
    waiting.result(PATIENCE)
    assert c("SELECT lock.try_exclusive(1)") is False
    third = c.later("SELECT lock.exclusive(1)")
    world.waits(c, third)
    b.commit()
    third.result(PATIENCE)


def test_two_shared_holders_that_unlock_do_not_deadlock(world: World) -> None:
    a, b = world.client(), world.client()
    for client in (a, b):
        client("SELECT lock.shared(1)")
        client.commit()
    a("SELECT lock.shared(1)")
    b("SELECT lock.shared(1)")
    assert a.later("SELECT lock.unlock(1)").result(PATIENCE) in (None, "")
    assert b.later("SELECT lock.unlock(1)").result(PATIENCE) in (None, "")
    a.commit()
    b.commit()


def test_unlock_and_vacuum_skip_keys_of_others(world: World, variant: str) -> None:
    a, b = world.client(), world.client()
    for number in range(5):
        a(f"SELECT lock.exclusive({number})")
    a.commit()
    a("SELECT lock.exclusive(0), lock.shared(1)")
    b.later("SELECT lock.unlock(0)").result(PATIENCE)
    removed = b.later("SELECT lock.vacuum()").result(PATIENCE)
    b.commit()
    a.commit()
    left = [row[0] for row in run(world.url, "SELECT key FROM lock.locked_keys ORDER BY key")]
    assert (removed, left) == ((3, [0, 1]) if variant in BY_ROWS else (0, []))


@pytest.mark.parametrize("variant", ["table", "yugabytedb"], indirect=True)
def test_vacuum_continues_until_no_free_key_is_left(world: World) -> None:
    run(world.url, "INSERT INTO lock.locked_keys (key) SELECT generate_series(1, 25000)")
    a, b = world.client(), world.client()
    a("SELECT lock.exclusive(12345)")
    assert b("SELECT lock.vacuum()") == 24999
    b.commit()
    assert run(world.url, "SELECT key FROM lock.locked_keys") == [(12345,)]


def test_locked_keys_shows_held_keys(world: World, variant: str) -> None:
    a = world.client()
    began = time.time()
    a("SELECT lock.exclusive(-5), lock.shared(9223372036854775807)")
    a.commit() if variant in BY_ROWS else None
    rows = run(world.url, "SELECT key, extract(epoch FROM ts)::float FROM lock.locked_keys ORDER BY key")
    assert [row[0] for row in rows] == [-5, 2**63 - 1]
    assert all(began - 1 <= row[1] <= time.time() + 1 for row in rows)
    if variant not in BY_ROWS:
        held = run(world.url, "SELECT pid, mode FROM lock.locked_keys ORDER BY key")
        assert held == [(a.pid, "exclusive"), (a.pid, "shared")]


@pytest.mark.parametrize("variant", ["advisory"], indirect=True)
def test_the_view_shows_only_keys_granted_in_this_database(world: World, fresh: Fresh, tmp_path: Path) -> None:
    other = fresh("postgresql15", "psycopg")
    Project(tmp_path / "other", other, "directives").upgrade()
    elsewhere = World(other)
    a, b, c, d = world.client(), world.client(), elsewhere.client(), world.client()
    try:
        a("SELECT lock.exclusive(1)")
        waiting = b.later("SELECT lock.exclusive(1)")
        world.waits(b, waiting)
        c("SELECT lock.exclusive(2)")
        d("SELECT pg_advisory_xact_lock(1, 1)")  # the server's other key space
        assert run(world.url, "SELECT key FROM lock.locked_keys") == [(1,)]
        a.commit()
        waiting.result(PATIENCE)
    finally:
        elsewhere.close()


def test_keys_created_in_advance(world: World, variant: str) -> None:
    a, b = world.client(), world.client()
    assert a("SELECT lock.create('{2,1,2}')") == (2 if variant in BY_ROWS else 0)
    a.commit()
    assert a("SELECT lock.create('{1,2,3}')") == (1 if variant in BY_ROWS else 0)
    a.commit()
    for client in (a, b):
        assert client.later("SELECT lock.shared(3)").result(PATIENCE) in (None, "")


NAMES = [("a",), ("a", "b"), ("a:b",), ("invoice", "42"), ("naïve 😀", "%s"), (" ",), ("x" * 10000,)]


def test_key_equals_the_python_function(world: World) -> None:
    for parts in NAMES:
        with sa.create_engine(world.url, poolclass=sa.NullPool).connect() as connection:
            markers = ", ".join(f":p{number}" for number in range(len(parts)))
            values = {f"p{number}": part for number, part in enumerate(parts)}
            assert connection.scalar(sa.text(f"SELECT lock.key({markers})"), values) == key(*parts)
    assert run(world.url, "SELECT lock.key(NULL), lock.key('a', NULL, 'b')") == [(None, None)]


def test_a_null_key_is_refused(world: World) -> None:
    calls = [f"{call}(NULL)" for call in ("exclusive", "shared", "try_exclusive", "try_shared", "unlock", "create")]
    for call in (*calls, "create(ARRAY[1, NULL])"):
        with pytest.raises(sa.exc.DBAPIError, match="a lock key must not be NULL"):
            run(world.url, f"SELECT lock.{call}")


LOCKING = ("exclusive", "shared", "try_exclusive", "try_shared")
#: They never wait, so no snapshot is older than a wait.
OTHERS = ("unlock(1)", "vacuum()", "create('{1,2}')")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_older_than_the_lock_is_refused(world: World, level: str) -> None:
    a = world.client()
    for call in LOCKING:
        for allow_stale in ("", ", false", ", NULL"):
            assert refusal(a, level, f"SELECT lock.{call}(1{allow_stale})") == "SL003"
        a.rollback()
        a(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert a(f"SELECT lock.{call}(1, true)") in (None, "", True)
        a.rollback()
        a("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        assert a(f"SELECT lock.{call}(1)") in (None, "", True)
    for call in OTHERS:
        a.rollback()
        a(f"SET TRANSACTION ISOLATION LEVEL {level}")
        a(f"SELECT lock.{call}")


def refusal(client: Client, mode: str, sql: str) -> str:
    client.rollback()
    client(f"SET TRANSACTION {mode if mode == 'READ ONLY' else 'ISOLATION LEVEL ' + mode}")
    with pytest.raises(sa.exc.DBAPIError) as caught:
        client(sql)
    error: Any = caught.value.orig
    # a sentence: what, why, and what to do instead after the colon
    assert error.diag.message_primary.startswith("no lock is taken in a")
    assert ": " in error.diag.message_primary
    return str(error.sqlstate)


def test_a_read_only_transaction_is_refused(world: World) -> None:
    a = world.client()
    for call in LOCKING:
        assert refusal(a, "READ ONLY", f"SELECT lock.{call}(1, true)") == "SL002"
    for call in OTHERS:
        assert refusal(a, "READ ONLY", f"SELECT lock.{call}") == "SL002"


@pytest.mark.parametrize("locking", ["native", "table"])
def test_a_standby_is_refused(servers: Servers, locking: str, tmp_path: Path) -> None:
    primary, standby = servers.pair()
    database = f"functions_{locking}"
    primary.create_database(database)
    Project(tmp_path, sa.make_url(primary.url("psycopg", database)), "directives", locking=locking).upgrade()
    standby.catch_up()
    client = Client(sa.make_url(standby.url("psycopg", database)))
    try:
        for call in (*(f"{call}(1, true)" for call in LOCKING), *OTHERS):
            with pytest.raises(sa.exc.DBAPIError, match=r"on a standby.*connect to the primary") as caught:
                client(f"SELECT lock.{call}")
            assert getattr(caught.value.orig, "sqlstate", None) == "SL001"
            client.rollback()
    finally:
        client.close()


@pytest.mark.parametrize("variant", ["yugabytedb"], indirect=True)
@pytest.mark.parametrize("function", [True, False])
def test_snapshot_isolation_reported_as_read_committed(world: World, function: bool) -> None:
    """A cluster without yb_enable_read_committed_isolation, as its function reports, or its setting."""
    a = world.client()
    name = "pg_catalog.yb_get_effective_transaction_isolation_level()"
    if function:
        a(f"CREATE OR REPLACE FUNCTION {name} RETURNS text LANGUAGE sql AS $$SELECT 'Repeatable Read'$$")
    else:
        a(f"DROP FUNCTION {name}")
        # a setting without a dot can't be defined: the function that reads settings is replaced
        a(
            "CREATE FUNCTION public.current_setting(text, boolean) RETURNS text LANGUAGE sql AS "
            "$$SELECT CASE $1 WHEN 'yb_effective_transaction_isolation_level' THEN 'repeatable read' END$$"
        )
        a("SET search_path = public, pg_catalog")
    a.commit()
    assert a("SHOW transaction_isolation") == "read committed"
    for call in LOCKING:
        assert refusal(a, "READ COMMITTED", f"SELECT lock.{call}(1)") == "SL003"
    a.rollback()
    a("SELECT lock.exclusive(1, true)")


@pytest.mark.parametrize("variant", ["yugabytedb"], indirect=True)
@pytest.mark.parametrize("before", ["on", "off"])
def test_the_setting_of_yugabytedb_is_restored(world: World, before: str) -> None:
    a = world.client()
    a(f"SET yb_disable_transactional_writes = {before}")
    a.commit()
    for number, call in enumerate(LOCKING):
        a(f"SELECT lock.{call}({number})")
        assert a("SHOW yb_disable_transactional_writes") == before
    a.commit()
    assert a("SHOW yb_disable_transactional_writes") == before


@pytest.mark.parametrize("variant", ["yugabytedb"], indirect=True)
def test_keys_are_inserted_outside_the_transaction(world: World) -> None:
    """The setting is on while the row is inserted, by every function."""
    run(
        world.url,
        "CREATE TABLE seen (setting text)",
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO seen VALUES (current_setting('yb_disable_transactional_writes')); RETURN NEW; END$$",
        "CREATE TRIGGER see BEFORE INSERT ON lock.locked_keys FOR EACH ROW EXECUTE FUNCTION see()",
    )
    for number, call in enumerate(LOCKING):
        run(world.url, f"SELECT lock.{call}({number})")
    assert run(world.url, "SELECT setting FROM seen") == [("on",)] * 4


@pytest.mark.parametrize("variant", ["yugabytedb"], indirect=True)
def test_an_invisible_key_ends_the_loop(world: World) -> None:
    """As with a snapshot that is too old; here a trigger drops the row."""
    run(
        world.url,
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$",
        "CREATE TRIGGER swallow BEFORE INSERT ON lock.locked_keys FOR EACH ROW EXECUTE FUNCTION swallow()",
    )
    a = world.client()
    for call in ("exclusive", "shared"):
        with pytest.raises(sa.exc.DBAPIError, match="could not serialize access") as caught:
            a(f"SELECT lock.{call}(1)")
        assert getattr(caught.value.orig, "sqlstate", None) == "40001"
        a.rollback()
    for call in ("try_exclusive", "try_shared"):
        assert a(f"SELECT lock.{call}(1)") is False


def test_no_overlap_while_keys_are_unlocked_and_vacuumed(world: World, variant: str) -> None:
    """Many holders, half of them unlocking, one vacuuming: never two holders at the same time, never an error."""
    inside: dict[int, int] = {}
    overlaps, errors, taken = [], [], []
    over = threading.Event()

    def work(number: int) -> None:
        client = Client(world.url)
        try:
            for turn in range(number, number + TURNS):
                key_ = turn % 2
                if turn % 3:
                    client(f"SELECT lock.exclusive({key_})")
                elif not client(f"SELECT lock.try_exclusive({key_})"):
                    client.commit()
                    continue
                inside[key_] = inside.get(key_, 0) + 1
                if inside[key_] > 1:
                    overlaps.append(key_)
                time.sleep(0.001)
                inside[key_] -= 1
                if turn % 2:
                    client(f"SELECT lock.unlock({key_})")
                client.commit()
                taken.append(key_)
        except Exception as error:
            errors.append(error)
        finally:
            client.close()

    def vacuum() -> None:
        client = Client(world.url)
        try:
            while not over.is_set():
                client("SELECT lock.vacuum()")
                client.commit()
        finally:
            client.close()

    vacuuming = later(vacuum)
    try:
        all_of(*(partial(work, number) for number in range(6)))
    finally:
        over.set()
    vacuuming.result(PATIENCE)
    assert (overlaps, errors) == ([], [])
    # two turns of three wait until they have it
    assert len(taken) >= 6 * TURNS * 2 // 3

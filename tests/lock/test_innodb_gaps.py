"""MySQL and MariaDB: when a key's first INSERT is rolled back, its waiters lock no gap, and so no other key."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, select, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import INNODB, PATIENCE, all_of, connected, later, until, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
TAKES: list[Any] = [sl.lock.try_exclusive, sl.lock.try_shared, sl.lock.exclusive, sl.lock.shared, sl.lock.create]

databases = pytest.mark.parametrize("name", INNODB)
level = pytest.mark.parametrize("level", LEVELS)
waits = pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])


class _RolledBack(Exception):
    pass


class Block:
    """A block of ``Locks`` in a thread, open until :meth:`end`."""

    def __init__(self, block: Any) -> None:
        self.entered: Future[Any] = Future()
        self._end: Future[bool] = Future()
        self._over = later(self._run, block)

    def _run(self, block: Any) -> None:
        try:
            with contextlib.suppress(_RolledBack), block as held:
                self.entered.set_result(held)
                if self._end.result(PATIENCE):
                    raise _RolledBack
        except BaseException as error:
            if not self.entered.done():
                self.entered.set_exception(error)
            raise

    def end(self, *, rollback: bool = False) -> None:
        self._end.set_result(rollback)
        self._over.result(PATIENCE)


@pytest.fixture
def table(request: pytest.FixtureRequest, servers: Servers, name: str) -> Iterator[Engine]:
    """An engine with its own table of keys, in the state that the parameter names, at the server's default level."""
    url = servers.fresh(name, PLAIN[name])
    install(url)
    # the server ends a wait that must not happen, and the test then fails
    limit = {"init_command": "SET innodb_lock_wait_timeout=20"}
    with connected(url, pool_size=20, connect_args=limit) as engine:
        locks, state = sl.Locks(engine), getattr(request, "param", "small")
        if state != "empty":
            locks.run(sl.lock.create(*(f"known {number}" for number in range(5))))
        if state == "vacuumed":
            assert locks.run(sl.lock.vacuum()) == 5
        yield engine


def never_used(number: int) -> list[int]:
    """Keys on either side of a key, near and far."""
    return [number - 1, number + 1000, sl.lock.key(unused())]


def others_go_on(engine: Engine, number: int) -> None:
    """New keys are acquired without a wait, by blocks and tries, at every isolation level."""
    locks = sl.Locks(engine)
    for key in never_used(number):
        for block in (locks.exclusive(key, timeout=0), locks.shared(key, timeout=0), locks.exclusive(key, timeout=5)):
            with block:
                pass
    for level in LEVELS:
        with engine.connect().execution_options(isolation_level=level) as connection:
            for make in TAKES:
                for key in never_used(number + 10):
                    assert connection.scalar(make(key)) is not False
                connection.rollback()


def waiting_for(engine: Engine) -> int:
    """How many sessions wait for a lock of this engine's database."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return int(
            connection.scalar(
                text(
                    "SELECT (SELECT count(*) FROM information_schema.innodb_trx AS trx"
                    " JOIN information_schema.processlist AS session ON session.id = trx.trx_mysql_thread_id"
                    " WHERE trx.trx_state = 'LOCK WAIT' AND session.db = DATABASE())"
                    " + (SELECT count(*) FROM information_schema.processlist"
                    " WHERE state = 'User lock' AND db = DATABASE())"
                )
            )
            or 0
        )


def until_waiting(engine: Engine, *calls: Future[Any]) -> None:
    # InnoDB refreshes its table of transactions only when it was not read for a tenth of a second
    until(lambda: waiting_for(engine) == len(calls), pause=0.13, unless=calls[0])


@databases
@pytest.mark.parametrize("table", ["small", "empty", "vacuumed"], indirect=True)
@waits
def test_block_that_waited_for_a_rollback_locks_no_gap(table: Engine, shared: bool) -> None:
    locks, number = sl.Locks(table), 5000
    first = Block(locks.exclusive(number))
    first.entered.result(PATIENCE)
    second = Block((locks.shared if shared else locks.exclusive)(number))
    until_waiting(table, second.entered)
    first.end(rollback=True)
    second.entered.result(PATIENCE)
    later(others_go_on, table, number).result(PATIENCE)
    second.end()


@pytest.mark.parametrize("name", ["mysql"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@waits
def test_rollback_between_two_looks_at_the_row(
    table: Engine, level: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MariaDB looks once: its INSERT doesn't wait."""
    number, real, looks = 5000, None, []
    first = table.connect().execution_options(isolation_level="READ COMMITTED")
    first.execute(sl.lock.exclusive(number))

    def look(*arguments: Any, **named: Any) -> Any:
        looks.append(real(*arguments, **named))
        if looks[-1] is Any.UNCOMMITTED:
            first.rollback()
        return looks[-1]

    monkeypatch.setattr(innodb, "ensure_row", look)
    with table.connect().execution_options(isolation_level=level) as second:
        second.execute((sl.lock.shared if shared else sl.lock.exclusive)(number))
        assert looks[0] is Any.UNCOMMITTED
        assert Any.ABSENT not in looks[1:], "this transaction's lock on the gap is in its own way"
        with table.connect() as third:
            assert third.scalar(sl.lock.try_exclusive(number)) is False
    first.close()


@databases
@level
@waits
def test_waiter_for_a_new_key_sees_what_its_holder_committed(table: Engine, level: str, shared: bool) -> None:
    """A read before the key is held would be the snapshot of all later reads at REPEATABLE READ."""
    number, account = 5000, Table(unused("account"), MetaData(), Column("amount", Integer), mysql_engine="InnoDB")
    account.create(table)
    # which inserts the row in its own transaction
    committed = table.connect().execution_options(isolation_level="READ COMMITTED")
    with committed as first, table.connect().execution_options(isolation_level=level) as second:
        first.execute(sl.lock.exclusive(number))
        waiting = later(second.execute, (sl.lock.shared if shared else sl.lock.exclusive)(number))
        until_waiting(table, waiting)
        first.execute(account.insert(), {"amount": 1})
        first.commit()
        waiting.result(PATIENCE)
        assert second.scalar(select(account.c.amount)) == 1
    account.drop(table)


@databases
@pytest.mark.parametrize("how", ["exclusive", "shared", "mixed"])
def test_several_waiters_for_a_rollback_lock_no_gap(table: Engine, how: str) -> None:
    """Also while the last of them still waits."""
    number = 5000
    # each as if of its own process: in one process they queue in memory, and only one waits in the server
    with contextlib.ExitStack() as opened:
        engines = [opened.enter_context(connected(table.url.render_as_string(False))) for _ in range(3)]
        first = Block(sl.Locks(table).exclusive(number))
        first.entered.result(PATIENCE)
        blocks = []
        for turn, engine in enumerate(engines):
            locks = sl.Locks(engine)
            shares = how == "shared" or (how == "mixed" and turn % 2 == 1)
            blocks.append(Block((locks.shared if shares else locks.exclusive)(number)))
        until_waiting(table, *(block.entered for block in blocks))
        first.end(rollback=True)
        left = list(blocks)
        while left:
            until(lambda: any(block.entered.done() for block in left))
            later(others_go_on, table, number).result(PATIENCE)
            inside = next(block for block in left if block.entered.done())
            inside.entered.result()
            left.remove(inside)
            inside.end(rollback=len(left) % 2 == 0)


@databases
@level
@waits
def test_session_that_waited_for_a_rollback_locks_no_gap(table: Engine, level: str, shared: bool) -> None:
    number = 5000
    first = Block(sl.Locks(table).exclusive(number))
    first.entered.result(PATIENCE)
    with table.connect().execution_options(isolation_level=level) as connection:
        waiting = later(connection.execute, (sl.lock.shared if shared else sl.lock.exclusive)(number))
        until_waiting(table, waiting)
        first.end(rollback=True)
        waiting.result(PATIENCE)
        later(others_go_on, table, number).result(PATIENCE)
        with table.connect() as another:
            assert another.scalar(sl.lock.try_exclusive(number)) is False


@databases
@pytest.mark.parametrize("takes", [sl.lock.try_exclusive, sl.lock.try_shared, sl.lock.create], ids=lambda f: f.__name__)
@level
def test_session_that_waited_for_any_insert_locks_no_gap(table: Engine, level: str, takes: Any) -> None:
    number = 5000
    with (
        table.connect().execution_options(isolation_level=level) as a,
        table.connect().execution_options(isolation_level=level) as b,
    ):
        a.execute(takes(number))
        waiting = later(b.execute, sl.lock.exclusive(number))
        if takes is not sl.lock.create:
            until_waiting(table, waiting)
        a.rollback()
        waiting.result(PATIENCE)
        later(others_go_on, table, number).result(PATIENCE)


@databases
@level
def test_create_that_waited_for_a_rollback_locks_no_gap(table: Engine, level: str) -> None:
    number = 5000
    first = Block(sl.Locks(table).exclusive(number))
    first.entered.result(PATIENCE)
    with table.connect().execution_options(isolation_level=level) as connection:
        waiting = later(connection.scalar, sl.lock.create(number))
        until_waiting(table, waiting)
        first.end(rollback=True)
        assert waiting.result(PATIENCE) == 1
        later(others_go_on, table, number).result(PATIENCE)
        connection.commit()
        assert connection.scalar(sl.lock.create(number)) == 0


@databases
@pytest.mark.parametrize("one_shot", LEVELS[:2])
@waits
def test_transaction_at_another_level_locks_no_gap(table: Engine, one_shot: str, shared: bool) -> None:
    """A SET TRANSACTION applies to one transaction, and no variable of the server shows it."""
    number, make = 5000, sl.lock.shared if shared else sl.lock.exclusive
    with table.connect() as a, table.connect() as b:
        a.execute(text(f"SET TRANSACTION ISOLATION LEVEL {one_shot}"))
        a.execute(make(number))
        later(others_go_on, table, number).result(PATIENCE)
        b.execute(text(f"SET TRANSACTION ISOLATION LEVEL {one_shot}"))
        waiting = later(b.execute, sl.lock.exclusive(number))
        until_waiting(table, waiting)
        a.rollback()
        waiting.result(PATIENCE)
        later(others_go_on, table, number).result(PATIENCE)


@databases
@level
@waits
def test_waiter_that_is_killed_locks_no_gap(table: Engine, level: str, shared: bool) -> None:
    number, locks = 5000, sl.Locks(table)
    first, third = Block(locks.exclusive(number)), None
    first.entered.result(PATIENCE)
    with table.connect().execution_options(isolation_level=level) as b, table.connect() as admin:
        backend = b.exec_driver_sql("SELECT CONNECTION_ID()").scalar()
        waiting = later(b.execute, (sl.lock.shared if shared else sl.lock.exclusive)(number))
        until_waiting(table, waiting)
        admin.exec_driver_sql(f"KILL {backend}")
        first.end(rollback=True)
        with contextlib.suppress(DBAPIError):
            # above READ COMMITTED it waits on another connection, which may not have ended yet
            waiting.result(PATIENCE)
        b.invalidate()
        third = Block(locks.exclusive(number))
        third.entered.result(PATIENCE)
        later(others_go_on, table, number).result(PATIENCE)
        third.end()


@databases
def test_blocks_tries_and_vacuums_on_changing_keys(servers: Servers, name: str) -> None:
    """Many clients over few brand-new names, with rollbacks: no overlap, no error, no try that waits.

    A holder keeps its key until a try of it, and a try of a new key, have returned: a try that waited
    for the holder would never return.
    """
    url, clients, turns = servers.fresh(name, PLAIN[name]), 6, 25
    install(url)
    guard, inside, overlaps = threading.Lock(), dict[str, int](), list[str]()
    with contextlib.ExitStack() as opened:
        engines = [opened.enter_context(connected(url)) for _ in range(clients)]
        tried = opened.enter_context(connected(url, pool_size=10))
        done = threading.Event()

        def tries(key: str, fresh: str) -> None:
            locks = sl.Locks(tried)
            with pytest.raises(sl.LockTimeout), locks.exclusive(key, timeout=0):
                pass
            with locks.exclusive(fresh, timeout=0):
                pass
            with tried.connect().execution_options(isolation_level=random.choice(LEVELS)) as connection:
                assert connection.scalar(sl.lock.try_exclusive(key)) is False
                # above READ COMMITTED it may be committed before it is held, and the vacuum may lock it in between
                connection.scalar(sl.lock.try_shared(f"{fresh} too"))
            with tried.connect().execution_options(isolation_level="READ COMMITTED") as connection:
                assert connection.scalar(sl.lock.try_shared(f"{fresh} as well")) is True

        def work(number: int) -> None:
            locks = sl.Locks(engines[number])
            for turn in range(turns):
                key = f"name {(turn + number) % 2} of {turn // 5}"
                with contextlib.suppress(_RolledBack), locks.exclusive(key, timeout=PATIENCE):
                    with guard:
                        inside[key] = inside.get(key, 0) + 1
                        if inside[key] > 1:
                            overlaps.append(key)
                    try:
                        later(tries, key, f"never {number} {turn}").result(PATIENCE)
                    finally:
                        with guard:
                            inside[key] -= 1
                    if turn % 2:
                        raise _RolledBack

        def vacuum() -> None:
            while not done.is_set():
                sl.Locks(tried).run(sl.lock.vacuum())

        vacuuming = later(vacuum)
        try:
            all_of(*(lambda number=number: work(number) for number in range(clients)))
        finally:
            done.set()
        vacuuming.result(PATIENCE)
    assert overlaps == []

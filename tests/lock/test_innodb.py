"""MySQL and MariaDB: every mode at every level, for brand-new and known keys: one record lock, InnoDB's own waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, event, text

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, Watch, all_of, later, snapshot_isolation, unused

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
#: the third is MariaDB with innodb_snapshot_isolation=ON, its default from 11.6.2
DATABASES = ["mysql", "mariadb", "mariadb-snapshot"]
PLACES = [(name, level) for name in DATABASES[:2] for level in LEVELS] + [(DATABASES[2], "REPEATABLE READ")]
MODES: dict[str, Any] = {
    "exclusive": sl.lock.exclusive,
    "shared": sl.lock.shared,
    "try_exclusive": sl.lock.try_exclusive,
    "try_shared": sl.lock.try_shared,
}
TRIES, WAITS = [sl.lock.try_exclusive, sl.lock.try_shared], [sl.lock.exclusive, sl.lock.shared]
SHARED = (sl.lock.shared, sl.lock.try_shared)

places = pytest.mark.parametrize(("name", "level"), PLACES)
modes = pytest.mark.parametrize("make", MODES.values(), ids=MODES)
ages = pytest.mark.parametrize("known", [False, True], ids=["brand-new", "known"])


@pytest.fixture
def innodb(engine_to: MakeEngine) -> MakeEngine:
    """Engines by the names of ``DATABASES``."""

    def make(name: str, driver: str | None = None, **options: Any) -> Engine:
        server, _, snapshot = name.partition("-")
        engine = engine_to(server, driver, **options)
        if snapshot:

            @event.listens_for(engine, "connect")
            def isolate(raw: Any, _: Any) -> None:
                with raw.cursor() as cursor:
                    cursor.execute("SET SESSION innodb_snapshot_isolation = ON")

        return engine

    return make


@pytest.fixture
def engine(innodb: MakeEngine, name: str, level: str) -> Engine:
    # a wait that must not happen ends as an error, or as False from a try
    limit = {"init_command": "SET innodb_lock_wait_timeout = 20"}
    engine = innodb(name, isolation_level=level, connect_args=limit, pool_size=10)
    with engine.begin() as connection:
        # no page may be split: what follows a split at a held row inherits its lock as one of the gap
        connection.execute(text("TRUNCATE TABLE lock_locked_keys"))
    return engine


@pytest.fixture
def watched(watch: Callable[[str], Watch], name: str) -> Watch:
    return watch(name.partition("-")[0])


def a_key(engine: Engine, known: bool) -> int:
    """A key that no other test locks; a known one was locked by this engine before."""
    number: int = sl.lock.key(unused())
    if known:
        with engine.begin() as connection:
            connection.execute(sl.lock.exclusive(number))
    return number


def others_go_on(engine: Engine, number: int) -> None:
    """Brand-new keys beside a key are acquired without a wait, in every mode at every level: no gap is locked."""
    for level in LEVELS:
        with engine.connect().execution_options(isolation_level=level) as connection:
            for distance, make in enumerate(MODES.values(), 1):
                for key in (number - distance, number + distance, number + 1000 * distance):
                    assert connection.scalar(make(key)) is not False
            connection.rollback()


@places
@ages
@modes
def test_compatible_locks_do_not_wait(engine: Engine, make: Any, known: bool) -> None:
    """Sharers share at once, a brand-new key, too; a try answers while the key is held; other keys are free."""
    key = a_key(engine, known)
    with engine.connect() as holder, engine.connect() as other:
        assert holder.scalar(make(key)) is not False
        for attempt in TRIES:
            both_share = make in SHARED and attempt in SHARED
            assert other.scalar(attempt(key)) is both_share
            other.rollback()
        if make in SHARED:
            later(other.scalar, sl.lock.shared(key)).result(PATIENCE)
            other.rollback()
        for again in MODES.values():
            assert holder.scalar(again(key)) is not False
        others_go_on(engine, key)
        holder.rollback()
        assert other.scalar(sl.lock.try_exclusive(key)) is True


TURNS = {
    "exclusive, exclusive, commit": (*WAITS[:1] * 2, "commit", False),
    "exclusive, shared, rollback": (*WAITS, "rollback", False),
    "shared, exclusive, kill": (*WAITS[::-1], "kill", False),
    "exclusive, exclusive, kill": (*WAITS[:1] * 2, "kill", True),
    "exclusive, shared, commit": (*WAITS, "commit", True),
    "shared, exclusive, rollback": (*WAITS[::-1], "rollback", True),
}


@places
@pytest.mark.parametrize(("first", "second", "end", "known"), TURNS.values(), ids=TURNS)
def test_waiter_is_the_next_holder(
    engine: Engine, watched: Watch, level: str, first: Any, second: Any, end: str, known: bool
) -> None:
    """However the holder ends. The waiter then sees what was committed, has the key, and has locked no gap."""
    key, account = a_key(engine, known), Table(unused("account"), MetaData(), Column("amount", Integer))
    account.create(engine)
    with engine.connect() as holder, engine.connect() as waiter, engine.connect() as third:
        holder.execute(first(key))
        holder.execute(account.insert(), {"amount": 1})
        waiting = later(waiter.execute, second(key))
        watched.until_waiting(waiting)
        if end == "kill":
            watched.kill(watched.backend(holder))
            holder.invalidate()
        getattr(holder, "commit" if end == "commit" else "rollback")()
        waiting.result(PATIENCE)
        if level != "SERIALIZABLE" or not snapshot_isolation(engine):  # where the wait has made a snapshot
            assert waiter.execute(account.select()).all() == ([(1,)] if end == "commit" else [])
        assert third.scalar(sl.lock.try_exclusive(key)) is False
        third.rollback()
        others_go_on(engine, key)
    account.drop(engine)


@places
@ages
def test_deadlock_is_detected(engine: Engine, watched: Watch, known: bool) -> None:
    """Each holds a key and waits for the other's: InnoDB rolls one of them back, and nobody waits for a limit."""
    a, b = a_key(engine, known), a_key(engine, known)
    with engine.connect() as one, engine.connect() as other, engine.connect() as third:
        for connection in (one, other, third):
            connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {PATIENCE}")
        other.execute(sl.lock.exclusive(b))  # before the other's snapshot: it waits also where it refuses newer rows
        one.execute(sl.lock.exclusive(a))
        waiting = later(one.execute, sl.lock.exclusive(b))
        watched.until_waiting(waiting)
        closing = later(other.execute, sl.lock.exclusive(a))
        (error,) = [error for call in (waiting, closing) if (error := call.exception(PATIENCE))]
        assert isinstance(error, sl.MustRollback)
        victim, number = (one, a) if waiting.exception() is error else (other, b)
        third.rollback()
        with pytest.raises(sl.MustRollback, match="for an earlier error"):
            victim.execute(sl.lock.exclusive(number))
        victim.rollback()
        assert victim.scalar(sl.lock.try_exclusive(unused()))


@places
@pytest.mark.parametrize("make", TRIES, ids=["try_exclusive", "try_shared"])
def test_concurrent_tries_of_a_brand_new_key(engine: Engine, make: Any) -> None:
    """No try fails, at most one exclusive try succeeds, and what they return is true."""
    for _ in range(5):
        key, connections = a_key(engine, False), [engine.connect() for _ in range(5)]
        held = all_of(*[partial(connection.scalar, make(key)) for connection in connections])
        with engine.connect() as another:
            assert another.scalar(sl.lock.try_exclusive(key)) is (not any(held))
        for connection in connections:
            connection.close()
        assert make is sl.lock.try_shared or sum(held) <= 1


@places
@pytest.mark.parametrize("make", [*TRIES, *WAITS], ids=lambda make: make.__name__)
def test_refusal_keeps_earlier_work(engine: Engine, make: Any) -> None:
    """A try that is refused, and a wait that times out, leave the transaction, its locks and the server's limit."""
    taken, mine, row = a_key(engine, False), a_key(engine, False), a_key(engine, False)
    with engine.connect() as holder, engine.connect() as other, engine.connect() as third:
        holder.execute(sl.lock.exclusive(taken))
        other.execute(sl.lock.exclusive(mine))
        other.execute(text("INSERT INTO lock_task_state (queue_id, id) VALUES ('earlier work', :row)"), {"row": row})
        if make in TRIES:
            assert other.scalar(make(taken)) is False
        else:
            with pytest.raises(sl.LockTimeout):
                other.execute(make(taken).execution_options(locks_wait=1))
        assert other.scalar(text("SELECT @@innodb_lock_wait_timeout")) == 20
        assert third.scalar(sl.lock.try_exclusive(mine)) is False
        third.rollback()
        other.commit()
        assert third.scalar(text("SELECT count(*) FROM lock_task_state WHERE id = :row"), {"row": str(row)}) == 1


@pytest.mark.parametrize("name", DATABASES[:2])
@pytest.mark.parametrize("one_shot", LEVELS)
@pytest.mark.parametrize("make", WAITS, ids=["exclusive", "shared"])
def test_transaction_at_a_level_of_its_own(innodb: MakeEngine, name: str, one_shot: str, make: Any) -> None:
    """A SET TRANSACTION applies to one transaction, and no variable of the server shows it."""
    engine = innodb(name)
    key = a_key(engine, False)
    with engine.connect() as one, engine.connect() as other:
        one.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {one_shot}")
        one.execute(make(key))
        others_go_on(engine, key)
        assert other.scalar(sl.lock.try_exclusive(key)) is False
        assert other.scalar(sl.lock.try_shared(key)) is (make is sl.lock.shared)


@pytest.mark.parametrize("name", DATABASES[:2])
@modes
def test_session_whose_level_was_set_by_sql(innodb: MakeEngine, name: str, make: Any) -> None:
    """SQLAlchemy takes it for READ COMMITTED, and the server knows better: the look must not lock the absent row's gap."""
    # a wait that must not happen ends as an error, or as False from a try
    limit = {"init_command": "SET innodb_lock_wait_timeout = 3"}
    engine = innodb(name, isolation_level="READ COMMITTED", connect_args=limit, pool_size=10)
    key = a_key(engine, False)
    with engine.connect() as holder, engine.connect() as other:
        holder.exec_driver_sql("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.rollback()
        assert holder.scalar(make(key)) is not False
        others_go_on(engine, key)
        assert other.scalar(sl.lock.try_exclusive(key)) is False
        holder.invalidate()


@pytest.mark.parametrize("make", MODES.values(), ids=MODES)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_row_that_is_newer_than_the_snapshot(innodb: MakeEngine, level: str, make: Any) -> None:
    """MariaDB with innodb_snapshot_isolation=ON rolls the transaction back: never a raw error."""
    engine = innodb("mariadb-snapshot", isolation_level=level)
    with engine.connect() as connection, engine.connect() as other:
        connection.scalar(make(a_key(engine, False)))  # without a read before it, it is no problem
        connection.execute(text("SELECT count(*) FROM lock_installed"))
        key = a_key(engine, False)
        with pytest.raises(sl.MustRollback, match="lock before the first read"):
            connection.execute(make(key))
        assert other.scalar(sl.lock.try_exclusive(key)) is True
        other.rollback()
        connection.rollback()
        assert connection.scalar(make(key)) is not False


@pytest.mark.parametrize("name", DATABASES[:2])
def test_longest_waits_in_a_strict_sql_mode(innodb: MakeEngine, name: str) -> None:
    """The server refuses a limit above its maximum there."""
    with innodb(name, isolation_level="REPEATABLE READ").connect() as connection:
        connection.exec_driver_sql("SET SESSION sql_mode = 'STRICT_ALL_TABLES', innodb_lock_wait_timeout = 100000000")
        for wait in (None, 40_000_000, 2**31):
            connection.execute(sl.lock.exclusive(unused()).execution_options(locks_wait=wait))
            assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar() == 100_000_000

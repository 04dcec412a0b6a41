"""MySQL and MariaDB: the rows of keys: when they are committed, by which connection, and when they are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, StaticPool, event, make_url, text

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import (
    ASYNC,
    INNODB,
    PATIENCE,
    Watch,
    async_connected,
    connected,
    installed,
    later,
    seen,
    snapshot_isolation,
    until,
    unused,
)

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
WAITS: list[Any] = [sl.lock.exclusive, sl.lock.shared]
MODES: list[Any] = [*WAITS, sl.lock.try_exclusive, sl.lock.try_shared]

databases = pytest.mark.parametrize("name", INNODB)
levels = pytest.mark.parametrize("level", LEVELS)
modes = pytest.mark.parametrize("make", MODES, ids=lambda make: make.__name__)


def keys_of(engine: Engine) -> set[int]:
    with engine.connect() as connection:
        return set(connection.scalars(text("SELECT `key` FROM lock_locked_keys")))


def grow_old(engine: Engine) -> None:
    """Make all keys as old as a vacuum deletes them."""
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE lock_locked_keys SET ts = ts - INTERVAL 61 SECOND")


@pytest.fixture
def table(servers: Servers, name: str) -> Any:
    """An engine whose table of keys is its own."""
    url = servers.fresh(name, PLAIN[name])
    install(url)
    with connected(url) as engine:
        yield engine


@databases
@levels
def test_vacuum_deletes_old_free_keys(table: Engine, level: str) -> None:
    """Of hundreds of keys, without a wait, at every level, whatever becomes of the caller's transaction."""
    locks, held, shared, young = sl.Locks(table), sl.lock.key("held"), sl.lock.key("shared"), sl.lock.key("young")
    assert locks.run(sl.lock.create(*(f"key {number}" for number in range(250)), held, shared)) == 252
    grow_old(table)
    locks.run(sl.lock.create(young))
    with table.connect() as one, table.connect() as two, table.connect() as third:
        one.execute(sl.lock.exclusive(held))
        two.execute(sl.lock.shared(shared))
        caller = third.execution_options(isolation_level=level)
        assert caller.scalar(sl.lock.vacuum()) == 250
        caller.rollback()
        assert keys_of(table) == {held, shared, young}
        assert caller.scalar(sl.lock.try_exclusive(held)) is False
        assert caller.scalar(sl.lock.try_shared(shared)) is True


@databases
def test_known_key_is_brand_new_after_a_vacuum(table: Engine) -> None:
    """The engine that has deleted it no longer remembers it: sharers share at once."""
    with table.connect() as one, table.connect() as other:
        for _ in range(2):
            one.execute(sl.lock.shared("known"))
            assert other.scalar(sl.lock.try_shared("known")) is True
            one.rollback()
            other.rollback()
            grow_old(table)
            assert other.scalar(sl.lock.vacuum()) == 1


@databases
@levels
def test_created_keys_are_committed(table: Engine, level: str) -> None:
    with table.connect().execution_options(isolation_level=level) as connection:
        connection.execute(sl.lock.exclusive("a"))
        assert connection.scalar(sl.lock.create("a", "b", "c", "b")) == 2
        connection.rollback()
        assert connection.scalar(sl.lock.create("a", "b")) == 0
    assert keys_of(table) == {sl.lock.key(name) for name in "abc"}


# Between the two steps of a lock, and beside other writers of the row.


def before_the_lock(connection: Any, act: Callable[[], None]) -> None:
    """Act once, when the row of a key is committed and not locked yet."""
    committed: list[bool] = []

    @event.listens_for(connection.engine, "before_cursor_execute")
    def note(sender: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "NOT (EXISTS" in statement:
            committed.append(True)
        elif sender is connection and committed.pop() if committed else False:
            act()


@databases
@levels
@modes
def test_row_is_deleted_before_it_is_locked(engine_to: MakeEngine, name: str, level: str, make: Any) -> None:
    """By a vacuum that takes it for an old one: a waiting call holds the key by a row of its own, a try is refused."""
    key, engine, by = sl.lock.key(unused()), engine_to(name, isolation_level=level), engine_to(name)

    def delete() -> None:
        with by.begin() as vacuum:
            assert vacuum.execute(text("DELETE FROM lock_locked_keys WHERE `key` = :key"), {"key": key}).rowcount == 1

    with engine.connect() as connection, by.connect() as other:
        before_the_lock(connection, delete)
        held = connection.scalar(make(key))
        if make in WAITS:
            for neighbour in (key - 1, key + 1):
                assert other.scalar(sl.lock.try_exclusive(neighbour)) is True
            assert other.scalar(sl.lock.try_shared(key)) is False
        else:
            assert held is False
        connection.rollback()
        other.rollback()
        assert other.scalar(sl.lock.try_exclusive(key)) is True


@databases
@levels
@pytest.mark.parametrize("make", WAITS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_row_that_another_transaction_inserts(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str, level: str, make: Any, end: str
) -> None:
    """Its uncommitted row holds the key, whoever inserted it."""
    key, engine = sl.lock.key(unused()), engine_to(name, isolation_level=level)
    with engine_to(name).connect() as writer, engine.connect() as waiter, engine.connect() as third:
        writer.execute(text("INSERT INTO lock_locked_keys (`key`) VALUES (:key)"), {"key": key})
        assert third.scalar(sl.lock.try_shared(key)) is False
        third.rollback()
        waiting = later(waiter.execute, make(key))
        watch(name).until_waiting(waiting)
        getattr(writer, end)()
        try:
            waiting.result(PATIENCE)
        except sl.MustRollback:
            assert level == "SERIALIZABLE"
            assert snapshot_isolation(engine)
            return
        assert third.scalar(sl.lock.try_exclusive(key)) is False


# The side connection.


@databases
def test_new_keys_with_a_pool_of_one_connection(engine_to: MakeEngine, name: str) -> None:
    """The connection that commits the row isn't one of the app's pool, and is used again."""
    engine, made = (
        engine_to(name, isolation_level="REPEATABLE READ", pool_size=1, max_overflow=0, pool_timeout=1),
        list[int](),
    )
    event.listen(engine, "connect", lambda raw, _: made.append(raw.thread_id()))
    with engine.connect() as connection:
        for make in MODES * 2:
            assert connection.scalar(make(unused())) is not False
        assert connection.scalar(sl.lock.create(unused())) == 1
    assert len(made) == 2
    engine.dispose()
    mine = text("SELECT count(*) FROM information_schema.processlist WHERE id IN (:a, :b)")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        until(lambda: connection.scalar(mine, {"a": made[0], "b": made[1]}) == 0)


@databases
def test_idle_side_connection_that_the_server_has_closed(
    engine_to: MakeEngine, watch: Callable[[str], Watch], name: str
) -> None:
    # its side connections are none of another test's
    engine, made = engine_to(name, hide_parameters=True, logging_name=unused("engine")), list[int]()
    event.listen(engine, "connect", lambda raw, _: made.append(raw.thread_id()))
    with engine.connect() as connection:
        connection.execute(sl.lock.exclusive(unused()))
        watch(name).kill(made[1])
        connection.execute(sl.lock.exclusive(unused()))
    assert len(made) == 3


@databases
def test_side_connection_has_the_settings_of_the_app(servers: Servers, name: str) -> None:
    """Listeners of the engine choose the database, options the prefix and the schema."""
    url = servers.fresh(name, PLAIN[name])
    install(url, prefix="app_")
    with connected(url) as elsewhere, connected(installed(servers, name), isolation_level="REPEATABLE READ") as engine:
        database = elsewhere.url.database

        @event.listens_for(engine, "checkout")
        def use(raw: Any, *_: Any) -> None:
            with raw.cursor() as cursor:
                cursor.execute(f"USE {database}")

        options: dict[str, Any] = {"locks_prefix": "app_"}
        with engine.connect().execution_options(**options) as connection:
            for make in MODES:
                connection.execute(make(f"{make.__name__} by use"))
        event.remove(engine, "checkout", use)
        engine.dispose()
        options["schema_translate_map"] = {None: database}
        with engine.connect().execution_options(**options) as connection:
            for make in MODES:
                connection.execute(make(f"{make.__name__} by map"))
        with engine.connect() as connection:
            for make in MODES:
                connection.execute(make(f"{make.__name__} by option"), execution_options=options)
        wanted = {f"{make.__name__} by {how}" for make in MODES for how in ("use", "map", "option")}
        with elsewhere.connect() as connection:
            keys = set(connection.scalars(text("SELECT `key` FROM app_locked_keys")))
        assert keys == {sl.lock.key(each) for each in wanted}


def by_session(engine: Engine, statement: str) -> Callable[[Connection], object]:
    return lambda connection: connection.execute(text(statement))


def by_listener(what: str) -> Callable[[Engine, str], Callable[[Connection], object]]:
    def choose(engine: Engine, statement: str) -> Callable[[Connection], object]:
        event.listen(engine, what, lambda connection: connection.exec_driver_sql(statement))
        return lambda connection: None

    return choose


CHOICES = {"session": by_session, "engine_connect": by_listener("engine_connect"), "begin": by_listener("begin")}


@databases
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_side_connection_is_in_the_database_that_the_session_has_chosen(
    servers: Servers, table: Engine, name: str, choose: Any
) -> None:
    """Its row of a key would be one that the session doesn't see, which could never try that key with success."""
    url = servers.url(name, PLAIN[name], make_url(installed(servers, name)).database or "")
    permits, two = unused("semaphore"), [f"{make.__name__} in another database" for make in MODES]
    with connected(url, isolation_level="REPEATABLE READ") as engine:
        say = choose(engine, f"USE {table.url.database}")
        with engine.connect() as connection, table.connect() as elsewhere:
            say(connection)
            for make, key in zip(MODES, two, strict=True):
                assert connection.scalar(make(key)) is not False
                assert elsewhere.scalar(sl.lock.try_exclusive(key)) is False
                elsewhere.rollback()
            elsewhere.execute(sl.semaphore.create(permits, capacity=1))
            elsewhere.scalar(sl.semaphore.acquire({permits: 1}, external_id=permits))
            elsewhere.commit()
            assert connection.scalar(sl.semaphore.release(permits)) is sl.Released.RELEASED
            connection.commit()
    assert keys_of(table) >= {sl.lock.key(key) for key in two}
    with connected(url) as engine:
        assert not keys_of(engine) & {sl.lock.key(key) for key in two}


@databases
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_side_connection_has_the_role_of_the_session(table: Engine, name: str, choose: Any) -> None:
    role = unused("role").replace(" ", "_").replace(".", "%")
    user, quoted = f"{name}_app", role.replace("%", "%%")
    with table.begin() as connection:
        for statement in (
            f"CREATE USER IF NOT EXISTS {user} IDENTIFIED BY 'secret'",
            f"CREATE ROLE `{quoted}`",
            f"GRANT ALL ON {table.url.database}.* TO `{quoted}`",
            f"GRANT `{quoted}` TO {user}",
        ):
            connection.exec_driver_sql(statement)
    url = table.url.set(username=user, password="secret", database="")
    options: dict[str, Any] = {"schema_translate_map": {None: table.url.database}}
    try:
        with connected(
            url.render_as_string(hide_password=False), isolation_level="REPEATABLE READ", execution_options=options
        ) as engine:
            say = choose(engine, f"SET ROLE `{role}`" if choose is by_session else f"SET ROLE `{quoted}`")
            with engine.connect() as connection:
                say(connection)
                for make in MODES:
                    assert connection.scalar(make(unused())) is not False
    finally:
        with table.begin() as connection:
            connection.exec_driver_sql(f"DROP ROLE `{quoted}`")


@databases
def test_pool_of_one_connection_for_all_is_refused(engine_to: MakeEngine, name: str) -> None:
    with (
        engine_to(name, poolclass=StaticPool).connect() as connection,
        pytest.raises(sl.Unsupported, match="StaticPool has one"),
    ):
        connection.execute(sl.lock.exclusive(unused()))


@pytest.mark.parametrize(
    ("name", "driver"), [pair for pair in ASYNC.values() if pair[0] in INNODB], ids=lambda part: part
)
def test_cancelled_call_for_a_new_key(servers: Any, watch: Callable[[str], Watch], name: str, driver: str) -> None:
    """While it waits: afterwards nothing is held, and the engine goes on."""
    key, watched = unused(), watch(name)

    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine, engine.connect() as other:
            waiting = asyncio.create_task(other.execute(sl.lock.exclusive(key)))
            while not await asyncio.to_thread(watched.waiting):
                await asyncio.sleep(0.13)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with engine.connect() as again:
                assert await again.scalar(sl.lock.try_exclusive(unused())) is True

    with connected(installed(servers, name)) as engine, engine.connect() as holder, engine.connect() as third:
        holder.execute(sl.lock.exclusive(key))
        asyncio.run(main())
        holder.rollback()
        # the server notices at the latest when the key is free
        until(lambda: third.scalar(sl.lock.try_exclusive(key)))


@databases
def test_known_key_is_one_statement(engine_to: MakeEngine, name: str) -> None:
    """At each level; a new one is five, on two connections."""
    for level in LEVELS:
        engine = engine_to(name, isolation_level=level)
        with engine.connect() as connection, seen(engine) as statements:
            connection.execute(sl.lock.exclusive("warm"))
            connection.rollback()
            for expected in (5, 1):
                statements.clear()
                connection.execute(sl.lock.exclusive("new in this test" + level))
                connection.rollback()
                assert len(statements) == expected

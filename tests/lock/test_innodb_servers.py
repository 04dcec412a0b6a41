"""MySQL and MariaDB: servers whose settings break a promise, and the URLs that lead to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, event, make_url, select, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for, mysql
from tests.conftest import PLAIN, install
from tests.fixtures.parties import INNODB, connected, installed, seen, unused

PAGE = Table(
    "page", MetaData(), Column("id", Integer, primary_key=True), mysql_engine="InnoDB", mariadb_engine="InnoDB"
)
ACQUIRE: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared]


def answers(engine: Engine, asked: str, answer: str = "1") -> None:
    """Have the server say that a setting is on."""

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def replaced(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> tuple[str, Any]:
        return statement.replace(asked, answer), parameters


@pytest.mark.parametrize("name", INNODB)
def test_innodb_rollback_on_timeout_is_refused(engine: Engine) -> None:
    answers(engine, mysql._ASKED, "SELECT 'innodb_rollback_on_timeout', 'ON'")
    locks = sl.Locks(engine)
    for _ in range(2):
        with engine.connect() as connection, pytest.raises(sl.Unsupported, match=r"rollback_on_timeout=ON.*OFF"):
            connection.execute(sl.lock.exclusive("a"))
        with Session(engine) as session, pytest.raises(sl.Unsupported, match=r"set it to OFF"):
            session.execute(sl.lock.try_exclusive("a"))
        with pytest.raises(sl.Unsupported, match=r"set it to OFF"), locks.exclusive("a", timeout=5):
            pass


@pytest.mark.parametrize("name", INNODB)
def test_server_with_innodb_read_only_is_refused(engine: Engine) -> None:
    """InnoDB then grants a row's lock to several sessions, and ``read_only`` is off."""
    PAGE.create(engine, checkfirst=True)
    locks = sl.Locks(engine)
    locks.run(sl.lock.create("known"))
    answers(engine, "@@global.innodb_read_only")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT @@global.read_only").scalar() == 0
        operations: list[Any] = [make(key) for make in ACQUIRE for key in ("known", unused())]
        operations += [sl.lock.row(PAGE, 2), sl.lock.session_exclusive("known")]
        for operation in operations:
            with pytest.raises(sl.NotWritable):
                connection.execute(operation)
            connection.rollback()
    for timeout in (None, 0, 5):
        for method in (locks.exclusive, locks.shared):
            with pytest.raises(sl.NotWritable), method("known", timeout=timeout):
                pass


def test_setting_is_read_once_per_engine(servers: Any) -> None:
    for name in INNODB:
        with connected(installed(servers, name)) as engine, seen(engine) as statements:
            for _ in range(3):
                with engine.connect() as connection, Session(connection) as session:
                    connection.execute(sl.lock.exclusive(unused()))
                    session.execute(sl.lock.shared(unused()))
        assert len([line for line in statements if "innodb_rollback_on_timeout" in line]) == 1


@pytest.fixture(params=INNODB)
def accounts(servers: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """The engines of an administrator, and of a user whom ``read_only`` applies to."""
    name = request.param
    administrator = servers.fresh(name, PLAIN[name])
    install(administrator)
    user = f"reader_{make_url(administrator).database}"
    database = make_url(administrator).database
    with connected(administrator, isolation_level="AUTOCOMMIT") as by:
        with by.connect() as connection:
            PAGE.create(connection)
            connection.execute(PAGE.insert().values(id=1))
            connection.exec_driver_sql(f"CREATE USER '{user}'@'%%' IDENTIFIED BY 'secret'")
            connection.exec_driver_sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO '{user}'@'%%'")
        role = make_url(administrator).set(username=user, password="secret").render_as_string(hide_password=False)
        with connected(role) as engine:
            with engine.begin() as connection:
                connection.execute(sl.lock.create("known"))
            try:
                yield by, engine
            finally:
                set_read_only(by, 0)


@pytest.fixture
def read_only(accounts: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Those engines, to a server that is read-only as a replica."""
    set_read_only(accounts[0], 1)
    return accounts


def set_read_only(by: Engine, value: int) -> None:
    with by.connect() as connection:
        connection.exec_driver_sql(f"SET GLOBAL read_only = {value}")


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_acquire_on_a_replica_is_refused(read_only: tuple[Engine, Engine], level: str) -> None:
    """A replica's row locks have no effect on transactions of the primary."""
    _, engine = read_only
    with engine.execution_options(isolation_level=level).connect() as connection:
        for make in ACQUIRE:
            for key in ("known", unused()):
                with pytest.raises(sl.NotWritable):
                    connection.execute(make(key))
                connection.rollback()
        for operation in (sl.lock.session_exclusive("known"), sl.lock.row(PAGE, 1), sl.lock.row(PAGE, 2)):
            with pytest.raises(sl.NotWritable):
                connection.execute(operation)
            connection.rollback()
        for operation in (sl.lock.create(unused()), sl.lock.vacuum()):
            with pytest.raises(sl.NotWritable):
                connection.execute(operation)
            connection.rollback()


@pytest.mark.parametrize("make", ACQUIRE, ids=lambda make: make.__name__)
def test_administrator_gets_no_lock_on_a_replica(read_only: tuple[Engine, Engine], make: Any) -> None:
    """``read_only`` doesn't keep administrators from writing, so their locks would be granted, and have no effect."""
    administrator, _ = read_only
    with administrator.execution_options(isolation_level="READ COMMITTED").connect() as connection:
        if connection.dialect.is_mariadb:
            pytest.skip("MariaDB lets an account with READ ONLY ADMIN write on a read-only server, locks included")
        for key in ("known", unused()):
            with pytest.raises(sl.NotWritable):
                connection.execute(make(key))
            connection.rollback()


def test_primary_that_becomes_read_only_loses_the_lock(accounts: tuple[Engine, Engine]) -> None:
    """Where a replica is about to take its place, and to grant the lock to another; its own connections stay."""
    by, engine = accounts
    locks = sl.Locks(engine)
    for work in (False, True):
        with pytest.raises(sl.LockLost, match="read-only"), locks.exclusive("known") as held:
            if work:
                held.session.execute(select(PAGE))
            held.check()
            set_read_only(by, 1)
            with pytest.raises(sl.LockLost, match="read-only"):
                held.check()
            assert held.lost
            set_read_only(by, 0)


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_read_only_may_be_a_text(accounts: tuple[Engine, Engine], level: str) -> None:
    """As of MariaDB 12, which isn't at hand: 'OFF', 'ON' and two more, and every text is equal to 0."""
    by, engine = accounts

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def of_mariadb_12(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> tuple[str, Any]:
        return statement.replace("@@global.read_only", "IF(@@global.read_only, 'ON', 'OFF')"), parameters

    operations: list[Any] = [make("known") for make in ACQUIRE]
    operations += [sl.lock.row(PAGE, 1), sl.lock.session_exclusive("known")]
    with engine.execution_options(isolation_level=level).connect() as connection:
        for operation in operations:
            connection.execute(operation)
            connection.rollback()
        set_read_only(by, 1)
        for operation in operations:
            with pytest.raises(sl.NotWritable):
                connection.execute(operation)
            connection.rollback()
        assert {found.level for found in findings(connection) if found.subject == "writable"} == {"problem"}
        set_read_only(by, 0)
        assert {found.level for found in findings(connection) if found.subject == "writable"} == {"ok"}


def findings(connection: Connection) -> list[Any]:
    return list(backend_for(connection.dialect).findings(connection))


URLS = {
    "mysql+pymysql to MySQL": ("mysql", "mysql+pymysql"),
    "mysql+pymysql to MariaDB": ("mariadb", "mysql+pymysql"),
    "mariadb+pymysql to MariaDB": ("mariadb", "mariadb+pymysql"),
}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize(("name", "scheme"), URLS.values(), ids=URLS)
def test_mysql_url_to_mariadb_from_the_first_connection(servers: Any, name: str, scheme: str, level: str) -> None:
    """A mysql:// URL may lead to MariaDB, which is detected on connecting, before the first operation."""
    url = make_url(installed(servers, name)).set(drivername=scheme).render_as_string(hide_password=False)
    for make in (*ACQUIRE, sl.lock.create, sl.lock.unlock, lambda key: sl.lock.vacuum(), sl.lock.session_exclusive):
        with (
            connected(url, isolation_level=level) as engine,
            engine.connect() as connection,
            seen(engine) as statements,
        ):
            connection.execute(make(unused()))
            assert not any("get_lock" in line and "session" not in line for line in statements) or name == "mysql"
    with connected(url, isolation_level=level) as engine, sl.Locks(engine).exclusive(unused(), timeout=5) as held:
        assert held.session.scalar(text("SELECT 1")) == 1


@pytest.mark.parametrize("name", INNODB)
def test_one_server_pays_nothing_for_clusters(engine: Engine) -> None:
    locks, key = sl.Locks(engine), unused()
    for _ in range(2):
        with seen(engine) as statements, locks.exclusive(key) as held:
            held.session.execute(text("SELECT 1"))
    assert len(statements) == 5, statements

"""A role that has only the privileges of ``grant_to`` can use every operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.fixtures.parties import EVERYWHERE, connected, unused

NAMES = [name for name in EVERYWHERE if name != "sqlite"]
#: the role's URL and the administrator's
Urls = dict[str, tuple[URL, str]]
LEVELS = [
    (name, level)
    for name in NAMES
    for level in (["READ COMMITTED", "REPEATABLE READ"] if name in ("mysql", "mariadb") else ["READ COMMITTED"])
]


@pytest.fixture(scope="module")
def urls() -> Urls:
    return {}


def of_a_role(servers: Any, urls: Urls, name: str) -> URL:
    """The URL of an unprivileged role to a database whose locks another role has installed."""
    if name not in urls:
        engine, _, locking = name.partition("-")
        administrator = servers.fresh(engine, EVERYWHERE[name])
        role = f"role_{make_url(administrator).database}"
        innodb = name in ("mysql", "mariadb")
        with connected(administrator, poolclass=NullPool, isolation_level="AUTOCOMMIT") as by:
            with by.connect() as connection:
                if innodb:
                    connection.exec_driver_sql(f"CREATE USER '{role}'@'%%' IDENTIFIED BY 'secret'")
                else:
                    connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        install(administrator, grant_to=role, **({"locking": locking} if locking else {}))
        urls[name] = make_url(administrator).set(username=role, password="secret"), administrator
    return urls[name][0]


@pytest.fixture
def engine(servers: Any, urls: Urls, request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, level = request.param
    url = of_a_role(servers, urls, name).render_as_string(hide_password=False)
    with connected(url, isolation_level=level) as engine:
        yield engine


at_each_level = pytest.mark.parametrize("engine", LEVELS, indirect=True, ids="-".join)


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_error_of_a_missing_privilege_says_how_to_grant_it(servers: Any, name: str) -> None:
    administrator = servers.fresh(name, EVERYWHERE[name])
    role = f"role_{make_url(administrator).database}"
    install(administrator)
    with connected(administrator, poolclass=NullPool, isolation_level="AUTOCOMMIT") as by, by.connect() as connection:
        if name == "postgresql15":
            connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        else:
            connection.exec_driver_sql(f"CREATE USER '{role}'@'%%' IDENTIFIED BY 'secret'")
            connection.exec_driver_sql(f"GRANT SELECT ON lock_installed TO '{role}'@'%%'")
    url = make_url(administrator).set(username=role, password="secret").render_as_string(hide_password=False)
    with connected(url) as engine:
        operations: list[Any] = [sl.semaphore.create("s", 1), sl.Mutex().acquire("m"), sl.Queue().put(1)]
        if name == "postgresql15":
            operations.append(sl.lock.holders())  # elsewhere it reads no table of this library's
        for operation in operations:
            with pytest.raises(DBAPIError, match="sqlalchemy-locks install --grant-to"):
                sl.Locks(engine).run(operation)


@at_each_level
def test_every_operation_in_a_session(engine: Engine) -> None:
    new, known = unused(), unused()
    sl.Locks(engine).run(sl.lock.create(known))
    with Session(engine) as session, Session(engine) as other:
        for key in (new, known):
            assert session.scalar(sl.lock.exclusive(key)) is None
            assert other.scalar(sl.lock.try_exclusive(key)) is False
            assert other.scalar(sl.lock.try_shared(key)) is False
            other.rollback()
            session.execute(sl.lock.unlock(key))
            session.commit()
            assert other.scalar(sl.lock.try_exclusive(key)) is True
            other.rollback()
            assert session.scalar(sl.lock.shared(key)) is None
            session.commit()
            assert session.scalar(sl.lock.try_shared(key)) is True
            session.commit()
        assert session.scalar(sl.lock.create(new, unused())) >= 0
        session.commit()
        assert session.scalar(sl.lock.vacuum()) >= 0
        session.commit()

"""A role that has only the privileges of ``grant_to`` can use every operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, make_url
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.fixtures.parties import EVERYWHERE, connected, unused

NAMES = [name for name in EVERYWHERE if name != "sqlite"]
LEVELS = [
    (name, level)
    for name in NAMES
    for level in (["READ COMMITTED", "REPEATABLE READ"] if name in ("mysql", "mariadb") else ["READ COMMITTED"])
]


@pytest.fixture(scope="module")
def urls() -> dict[str, str]:
    """The URL of an unprivileged role, to a database of each server whose locks another role has installed."""
    return {}


@pytest.fixture
def engine(servers: Any, urls: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, level = request.param
    if name not in urls:
        server, _, locking = name.partition("-")
        administrator = servers.fresh(server, EVERYWHERE[name])
        role = f"role_{make_url(administrator).database}"
        innodb = name in ("mysql", "mariadb")
        created = f"USER '{role}'@'%%' IDENTIFIED BY 'secret'" if innodb else f"ROLE {role} LOGIN"
        with (
            connected(administrator, poolclass=NullPool, isolation_level="AUTOCOMMIT") as by,
            by.connect() as connection,
        ):
            connection.exec_driver_sql(f"CREATE {created}")
        install(administrator, grant_to=role, locking=locking or "native")
        url = make_url(administrator).set(username=role, password="secret")
        urls[name] = url.render_as_string(hide_password=False)
    with connected(urls[name], isolation_level=level) as engine:
        yield engine


at_each_level = pytest.mark.parametrize("engine", LEVELS, indirect=True, ids="-".join)


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

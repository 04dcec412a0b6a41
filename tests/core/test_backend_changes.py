"""A ``mysql://`` URL that leads to MariaDB: what was found out before SQLAlchemy knew is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.conftest import Servers
from tests.fixtures.parties import connected


def test_backend_follows_the_dialect(servers: Servers) -> None:
    with connected(servers.installed("mariadb", "pymysql")) as engine, engine.connect() as connection:
        dialect: Any = engine.dialect
        dialect.is_mariadb = False  # as while another thread's first connection is being examined
        with pytest.raises(DBAPIError):
            connection.execute(sl.lock.exclusive(1))
        dialect.is_mariadb = True
        connection.rollback()
        # MySQL's form of it is a syntax error
        connection = connection.execution_options(isolation_level="READ COMMITTED")
        connection.execute(sl.lock.shared(2))
        connection.rollback()
        assert connection.execute(sl.lock.holders(1)).all() == []

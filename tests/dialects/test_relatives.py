"""Databases that speak PostgreSQL's or MySQL's protocol and grant a lock to two: refused by name.

Each server here is a real PostgreSQL or MariaDB that answers as the relative does: extensions, tables, or a version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks import health
from sqlalchemy_locks.alembic import migration_lock
from tests import servers as real
from tests.conftest import Servers, install, not_here
from tests.servers.yugabytedb import ADVISORY

ONE_NODE = {"execution_options": {"locks_one_node": True}}
EXTENSION = "INSERT INTO pg_extension VALUES (99001, '{}', 10, 11, false, '1.0')"
NODES = "CREATE TABLE pg_catalog.pg_dist_node (nodeid int, groupid int, hasmetadata boolean)"
#: what the server has; how it is named; whether the option of one node allows it
POSTGRESQL: dict[str, tuple[tuple[str, ...], str, bool]] = {
    **{
        name: ((EXTENSION.format(name),), f"extension {name}.*locks_one_node", True)
        for name in ("pgactive", "bdr", "spock")
    },
    "citus": (
        (EXTENSION.format("citus"), NODES, "INSERT INTO pg_dist_node VALUES (1, 0, true), (2, 1, true)"),
        "Citus.*locks_one_node",
        True,
    ),
    "Limitless": (("ALTER DATABASE {database} SET stand_in.version = '16.4-limitless'",), "Limitless.*writer", False),
    "DSQL": (
        ("CREATE SCHEMA sys", "CREATE TABLE sys.jobs (id int)", "CREATE TABLE sys.iam_pg_role_mappings (id int)"),
        "DSQL.*writer",
        False,
    ),
}


def problems(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return [each.says for each in health.examine(connection) if each.level == "problem"]


def refusals(engine: Engine) -> Iterator[str]:
    """What is said by a block, an operation of a connection, a worker's capture, a migration; and by `check`."""
    with engine.connect() as connection:
        for use in (
            lambda: sl.Locks(engine).exclusive("a").__enter__(),
            lambda: connection.execute(sl.lock.try_exclusive("a")),
            lambda: sl.Locks(engine).run(sl.Queue().capture()),
            lambda: migration_lock(connection).__enter__(),
        ):
            with pytest.raises(sl.Unsupported) as refused:
                use()
            connection.rollback()
            yield str(refused.value)
    yield problems(engine)[0]


def executed(url: str, *commands: str) -> None:
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for command in commands:
            connection.exec_driver_sql(command.format(database=engine.url.database))


@pytest.mark.parametrize("name", POSTGRESQL)
def test_relatives_of_postgresql_are_refused_by_name(servers: Servers, name: str) -> None:
    commands, sentence, allowed = POSTGRESQL[name]
    url = servers.fresh("yugabytedb", "psycopg")  # whose server can answer as another one
    server = servers.server("yugabytedb")
    assert isinstance(server, real.YugabyteDB)
    server.configure(url.rpartition("/")[2], **{**ADVISORY, "stand_in.version": "15.12"})
    install(url)
    executed(url, "SET allow_system_table_mods = on", *commands)
    engine = create_engine(url, poolclass=NullPool)
    (says,) = set(refusals(engine))
    assert re.search(sentence, says)
    one, sent = create_engine(url, poolclass=NullPool, **ONE_NODE), []
    if not allowed:
        assert set(refusals(one)) == {says}
        return
    event.listen(one, "before_cursor_execute", lambda _, __, statement, *___: sent.append(statement))
    for _ in range(2):
        with sl.Locks(one).exclusive("a"):
            pass
    assert sum("pg_extension" in statement for statement in sent) == 1
    assert problems(one) == []
    # of a connection, not kept: the server has been asked by now
    with engine.connect().execution_options(locks_one_node=True) as connection:
        assert connection.scalar(sl.lock.try_exclusive("a")) is True
    assert set(refusals(one.execution_options(locks_one_node=False))) == {says}


def test_dsql_is_refused_by_its_host(servers: Servers) -> None:
    url = make_url(servers.fresh("postgresql15", "psycopg")).set(drivername="postgresql")
    host = "postgresql+psycopg://admin@abc.dsql.eu-west-1.on.aws/postgres"
    engine = create_engine(host, creator=lambda: psycopg.connect(url.render_as_string(False)), **ONE_NODE)
    (says,) = set(refusals(engine))
    assert "Aurora DSQL has no locks" in says
    engine.dispose()


@contextmanager
def answering(version: str) -> Iterator[Engine]:
    try:
        server = real.MariaDB(f"--version={version}").start()
    except real.Unavailable as why:
        not_here(why)
    engine = create_engine(server.url("pymysql"), poolclass=NullPool, **ONE_NODE)
    yield engine
    server.close()


def test_tidb_is_refused_by_name() -> None:
    with answering("5.7.10-TiDB-v2.1.19") as engine:
        (says,) = set(refusals(engine))
        assert re.search("TiDB ignores SKIP LOCKED.*use MySQL", says)


def test_vitess_is_warned_of() -> None:
    with answering("5.7.9-Vitess") as engine, engine.connect() as connection:
        warnings = [each.says for each in health.examine(connection) if each.level == "warning"]
        assert re.match("Vitess: with more than one shard", warnings[0])

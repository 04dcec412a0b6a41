"""A permanent refusal of the server's ends a worker, with its error; whatever passes by itself doesn't."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_named
from sqlalchemy_locks.health import examine
from sqlalchemy_locks.workers.database import may_pass
from tests.conftest import PLAIN, Servers, install, not_here
from tests.fixtures.parties import INNODB, connected
from tests.fixtures.queues import MakeEngine
from tests.servers import Unavailable
from tests.servers.mariadb import MariaDB
from tests.servers.mysql import MySQL

MISSING = ["SELECT no_such_column", "SELECT * FROM no_such_table", "SELECT FROM WHERE"]
#: what the server refuses whenever it is sent
REFUSED = {
    "postgresql15": [*MISSING, "DO $$BEGIN RAISE EXCEPTION 'a trigger says no'; END$$"],
    "mysql": MISSING,
    "mariadb": MISSING,
    "sqlite": MISSING,
}
PERMANENT: dict[str, list[Any]] = {
    "postgresql": ["42501", "42703", "P0001", "0A000", "23505", "22P02"],
    "mysql": [1044, 1054, 1142, 1143, 1227, 1146, 1665, 1364],
    "mariadb": [1142, 1227, 1665],
    "sqlite": ["no such column: a", "too many SQL variables", "attempt to write a readonly database"],
}
PASSING: dict[str, list[Any]] = {
    "postgresql": ["53100", "53300", "55006", "57P03", "58030", "40001", "XX000", None],
    "mysql": [1021, 1040, 1041, 1047, 1114, 1203, 1206, 1213, 2013, 3101, 9001, "a text"],
    "mariadb": [1020, 1021, 1040, 1047, 1114, 1927],
    "sqlite": ["disk I/O error", "database or disk is full", "unable to open database file", "database is locked"],
}


@pytest.mark.parametrize(("name", "refused"), [(name, each) for name, several in REFUSED.items() for each in several])
def test_refusal_ends_the_worker(engine_to: MakeEngine, name: str, refused: str) -> None:
    engine = engine_to(name)
    worker = sl.Worker(sl.Queue(), lambda job: None, bind=engine, name="refused", poll=0.1)

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def replace(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> Any:
        refuses = "processing_host" in statement and "UPDATE" in statement.upper()
        refuses = refuses or ("SELECT" in statement and "run_at" in statement)
        empty: Any = {} if isinstance(parameters, dict) else ()
        return (refused, empty) if refuses else (statement, parameters)

    with pytest.raises((DBAPIError, sl.NotInstalled)):
        worker.run(until_empty=True)


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_temporary(name: str) -> None:
    class Refusal(Exception):
        sqlstate: Any = None

    for signs, temporary in ((PASSING, True), (PERMANENT, False)):
        for sign in signs[name]:
            refusal = Refusal(sign, "refused")
            refusal.sqlstate = sign
            assert may_pass(OperationalError("SELECT 1", {}, refusal), backend_named(name)) is temporary, sign


@pytest.mark.parametrize("name", ["postgresql15", *INNODB])
def test_user_without_a_privilege(name: str, servers: Servers) -> None:
    url = make_url(servers.fresh(name, PLAIN[name]))
    user, postgresql = f"worker_{url.database}", name == "postgresql15"
    create = f"CREATE ROLE {user} LOGIN" if postgresql else f"CREATE USER '{user}' IDENTIFIED BY 'x'"
    with connected(url) as owner, connected(url.set(username=user, password="x")) as engine:
        with owner.begin() as connection:
            connection.exec_driver_sql(create)
        install(url.render_as_string(hide_password=False), grant_to=user)
        with owner.begin() as connection:
            connection.execute(sl.Queue().put("a job"))
            connection.exec_driver_sql(f"REVOKE UPDATE ON {'lock.job' if postgresql else 'lock_job'} FROM {user}")
        calls = (sl.Worker(sl.Queue(), print, bind=engine).run, lambda: sl.Locks(engine).run(sl.Queue().capture()))
        for refused in calls:
            with pytest.raises(DBAPIError, match="--grant-to"):
                refused()
        if not postgresql:
            with owner.begin() as connection:
                connection.exec_driver_sql(f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {user}")
            engine.dispose()
            for refused in calls:
                with pytest.raises(DBAPIError, match="1044.* to database"):  # at the connection
                    refused()


@pytest.mark.parametrize("kind", INNODB)
def test_statement_binlog(kind: str) -> None:
    options = ("--log-bin=binlog", "--binlog-format=STATEMENT", "--server-id=1")
    try:
        server = (MySQL if kind == "mysql" else MariaDB)(*options).start()
    except Unavailable as why:
        not_here(why)
    with server:
        server.create_database("statement")
        url = server.url("pymysql", "statement")
        install(url)
        job = sl.Queue().put("a job")
        with connected(url) as engine:
            with engine.begin() as connection:
                connection.execute(job)  # at REPEATABLE READ
                problems = [each.says for each in examine(connection) if each.level == "problem"]
            assert ["binlog_format=STATEMENT" in says for says in problems] == [True]
            refusing = [
                sl.Worker(sl.Queue(), print, bind=engine).run,
                lambda: sl.Locks(engine).run(job),
                lambda: sl.Locks(engine).exclusive("a").__enter__(),
            ]
            for refused in refusing:
                with pytest.raises(sl.Unsupported, match="binlog_format"):
                    refused()

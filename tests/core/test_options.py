"""Another schema or prefix for the tables, set at every level; and other execution options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, install
from tests.fixtures.parties import connected, seen, unused

ELSEWHERE = {"schema_translate_map": {"lock": "Elsewhere"}}
PREFIXED = {"locks_prefix": "mine_"}

Scalar = Callable[[Engine, Any, dict[str, Any]], Any]


def at_the_engine(engine: Engine, operation: Any, options: dict[str, Any]) -> Any:
    with engine.execution_options(**options).begin() as connection:
        return connection.scalar(operation)


def at_the_connection(engine: Engine, operation: Any, options: dict[str, Any]) -> Any:
    with engine.begin() as connection:
        return connection.execution_options(**options).scalar(operation)


def at_a_call_of_the_session(engine: Engine, operation: Any, options: dict[str, Any]) -> Any:
    with Session(engine) as session:
        return session.scalar(operation, execution_options=options)


def at_the_operation(engine: Engine, operation: Any, options: dict[str, Any]) -> Any:
    with Session(engine) as session:
        return session.scalar(operation.execution_options(**options))


def at_locks(engine: Engine, operation: Any, options: dict[str, Any]) -> Any:
    with sl.Locks(engine.execution_options(**options)).exclusive(unused()) as held:
        return held.session.scalar(operation)


LEVELS = [at_the_engine, at_the_connection, at_a_call_of_the_session, at_the_operation, at_locks]


@pytest.fixture(scope="module")
def elsewhere(servers: Any) -> dict[str, str]:
    """The URLs of databases in which the locks have another schema or prefix only."""
    urls = {name: servers.fresh(name, PLAIN[name]) for name in ("postgresql15", "mysql", "mariadb", "sqlite")}
    for name, url in urls.items():
        install(url, **({"schema": "Elsewhere"} if name == "postgresql15" else {"prefix": "mine_"}))
    return urls


@pytest.mark.parametrize("level", LEVELS)
def test_the_schema_is_an_option_of_every_level(elsewhere: dict[str, str], level: Scalar) -> None:
    with connected(elsewhere["postgresql15"]) as engine, seen(engine) as statements:
        assert level(engine, sl.lock.try_exclusive(unused()), ELSEWHERE) is True
        assert level(engine, sl.lock.create("a"), ELSEWHERE) == 0
        calls = [statement for statement in statements if "exclusive" in statement or "create" in statement]
        assert calls
        assert all('"Elsewhere".' in statement for statement in calls)


@pytest.mark.parametrize("name", ["mysql", "mariadb", "sqlite"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_prefix_is_an_option_of_every_level(elsewhere: dict[str, str], level: Scalar, name: str) -> None:
    with connected(elsewhere[name]) as engine, seen(engine) as statements:
        key = unused()
        assert level(engine, sl.lock.try_exclusive(key), PREFIXED) is True
        assert any("mine_locked_keys" in statement for statement in statements)
        assert not any("lock_locked_keys" in statement for statement in statements)


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_a_wrong_schema_or_prefix_raises_not_installed(elsewhere: dict[str, str], name: str) -> None:
    for options in ({}, {"locks_prefix": "nowhere_", "schema_translate_map": {"lock": "nowhere"}}):
        with connected(elsewhere[name], execution_options=options) as engine, engine.connect() as connection:
            with pytest.raises(sl.NotInstalled, match="alembic upgrade"):
                connection.execute(sl.lock.exclusive("a"))


def test_places_do_not_mix_on_one_engine(servers: Any) -> None:
    """Alternately, on one engine and its compiled cache, each execution uses its own schema or prefix."""
    url = servers.fresh("postgresql15", "psycopg")
    for schema in ("lock", "second", "third"):
        install(url, schema=schema)
    with connected(url) as engine, engine.begin() as connection, seen(engine) as statements:
        wanted = []
        for _ in range(3):
            for schema in ("lock", "second", "third", None):
                options = {} if schema is None else {"schema_translate_map": {"lock": schema}}
                for operation in (sl.lock.shared("a"), sl.lock.try_shared("a")):
                    connection.execute(operation, execution_options=options)
                    wanted.append(f"SELECT {schema or 'lock'}.{operation.name.removeprefix('lock.')}(")
        statements = [statement for statement in statements if not statement.startswith("SELECT version()")]
        assert len(statements) == len(wanted)
        assert all(statement.startswith(start) for statement, start in zip(statements, wanted, strict=True))


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_prefixes_do_not_mix_on_one_engine(servers: Any, name: str) -> None:
    url = servers.fresh(name, PLAIN[name])
    install(url)
    install(url, prefix="mine_")
    with connected(url) as engine, engine.begin() as connection:
        for n in range(6):
            options = PREFIXED if n % 2 else {}
            connection.execute(sl.lock.exclusive(n), execution_options=options)
            assert connection.scalar(sl.lock.try_exclusive(100 + n), execution_options=options) is True
        for table, first in (("lock_locked_keys", 0), ("mine_locked_keys", 1)):
            keys = connection.scalars(text(f"SELECT `key` FROM {table} ORDER BY `key`")).all()
            assert keys == [first, first + 2, first + 4, 100 + first, 102 + first, 104 + first]


def test_a_map_of_other_schemas(engine_to: Callable[..., Engine]) -> None:
    """The connection beside the transaction adds its database to the map, for statements that others execute, too."""
    engine, what = engine_to("mysql", execution_options={"schema_translate_map": {"tenant": "tenant_1"}}), unused()
    locks = sl.Locks(engine)
    locks.run(sl.semaphore.create(what, 1))
    with Session(engine) as session:
        for run, free in ((locks.run, True), (locks.run, False), (session.scalar, False)):
            assert run(sl.semaphore.acquire({what: 1}, external_id=unused())).acquired is free

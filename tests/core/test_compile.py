"""``compile()`` returns the statement that is executed, or raises a sentence that says why there is none."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine
from sqlalchemy.dialects import mssql, oracle
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import CompileError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from tests.fixtures.parties import seen, unused

KEY = sl.lock.key("a")
DOCUMENT = Table("document", MetaData(), Column("id", Integer, primary_key=True), Column("title", String(20)))


class Base(DeclarativeBase):
    pass


class Letter(Base):
    __tablename__ = "letter"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]


URLS = {
    "postgresql": "postgresql+psycopg",
    "yugabytedb": "yugabytedb+psycopg2",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "sqlite",
}
MAKE: dict[str, Any] = {
    "lock.exclusive": lambda: sl.lock.exclusive("a"),
    "lock.exclusive stale": lambda: sl.lock.exclusive("a", allow_stale=True),
    "lock.shared": lambda: sl.lock.shared("a"),
    "lock.try_exclusive": lambda: sl.lock.try_exclusive("a"),
    "lock.try_shared": lambda: sl.lock.try_shared("a"),
    "lock.unlock": lambda: sl.lock.unlock("a"),
    "lock.vacuum": sl.lock.vacuum,
    "lock.create": lambda: sl.lock.create("a", 7),
    "lock.session_exclusive": lambda: sl.lock.session_exclusive("a"),
    "lock.session_unlock": lambda: sl.lock.session_unlock("a"),
    "lock.row": lambda: sl.lock.row(DOCUMENT, 7),
    "lock.row mapped": lambda: sl.lock.row(Letter, 7),
}


def dialect_of(engine: str) -> Dialect:
    made: Dialect = create_engine(f"{URLS[engine]}://", paramstyle="named").dialect
    return made


@pytest.mark.parametrize("operation", MAKE)
@pytest.mark.parametrize("engine", URLS)
def test_compile_gives_a_statement_or_a_reason(engine: str, operation: str) -> None:
    """The statements themselves are in docs/sql.md, which a test holds equal to what is compiled."""
    made = MAKE[operation]()
    try:
        assert str(made.compile(dialect=dialect_of(engine)))
    except CompileError as error:
        refusal = one_sentence(error)
    else:
        return
    assert engine not in ("postgresql", "yugabytedb")
    assert refusal.startswith(f"{made.name} ")


def plain(statement: str) -> str:
    """Without line breaks, and without the casts that one driver needs and another doesn't."""
    for cast in ("BIGINT[]", "BIGINT", "INTEGER", "BOOLEAN"):
        statement = statement.replace(f"::{cast}", "")
    return " ".join(statement.split())


@pytest.mark.parametrize("operation", MAKE)
@pytest.mark.parametrize("dialect", [mssql.dialect(), oracle.dialect(), None], ids=["mssql", "oracle", "unnamed"])
def test_an_unsupported_engine_is_refused(operation: str, dialect: Dialect | None) -> None:
    with pytest.raises(sl.Unsupported) as refused:
        MAKE[operation]().compile(dialect=dialect)
    assert one_sentence(refused.value).startswith("sqlalchemy-locks does not know the engine ")


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert ". " not in text
    assert len(text) < 200
    return text


def test_the_prefix_of_the_tables_is_an_option() -> None:
    operation = sl.lock.shared("a").execution_options(locks_prefix="mine_")
    assert "DELETE FROM mine_locked_keys" in str(operation.compile(dialect=dialect_of("sqlite")))


def test_another_schema_at_compile_time() -> None:
    compiled = sl.lock.shared("a").compile(
        dialect=dialect_of("postgresql"), schema_translate_map={"lock": "Other Schema"}, render_schema_translate=True
    )
    assert plain(str(compiled)) == 'SELECT "Other Schema".shared(:lock_key, false, :wait_ms) AS shared_1'


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_compiled_statement_is_executed(engine: Engine) -> None:
    """With the dialect of a live engine, which knows its server, wherever there is one statement."""
    compared = 0
    with engine.connect() as connection:
        connection.execute(sl.lock.exclusive(unused()))  # execute the checks that are made once per engine
        for make in MAKE.values():
            operation = make()
            if operation.name == "lock.row":
                continue  # no such table here; see test_row_lock.py
            try:
                compiled = str(operation.compile(engine))
            except CompileError:
                continue
            with seen(engine) as statements:
                connection.execute(operation)
            # SQLite's busy timeout is read before each wait; PostgreSQL is checked once for a pooler
            asked = ("PRAGMA", "SELECT pg_backend_pid()")
            assert [line for line in statements if not line.startswith(asked)] == [compiled], operation
            compared += 1
            connection.rollback()
    assert compared >= 2

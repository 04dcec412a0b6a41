"""``compile()`` returns the statement that is executed, or raises a sentence that says why there is none."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine
from sqlalchemy.dialects import mssql, oracle
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import CompileError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
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
K = {"lock_key": KEY}
GRANTS_NOTHING = (
    "pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' OR "
    "coalesce(current_setting('yb_silence_advisory_locks_not_supported_error', true), 'off') = 'on'"
)
SESSION_NAME = "SHA2(CONCAT_WS(':', 'sqlalchemy_locks.session', DATABASE(), :lock_key), 256)"
ROW = "SELECT document.id, document.title FROM document WHERE document.id = :pk_0"
MAPPED = "SELECT letter.id, letter.title FROM letter WHERE letter.id = :pk_0"
WRITABLE = "CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AND @@global.innodb_read_only = 0"
PRIMARY = f" AND {WRITABLE}"

POSTGRESQL: dict[str, tuple[str, dict[str, Any]]] = {
    "lock.exclusive": ("SELECT lock.exclusive(:lock_key, false, :wait_ms) AS exclusive_1", {**K, "wait_ms": None}),
    "lock.exclusive stale": ("SELECT lock.exclusive(:lock_key, true, :wait_ms) AS exclusive_1", {**K, "wait_ms": None}),
    "lock.shared": ("SELECT lock.shared(:lock_key, false, :wait_ms) AS shared_1", {**K, "wait_ms": None}),
    "lock.try_exclusive": ("SELECT lock.try_exclusive(:lock_key, false) AS try_exclusive_1", K),
    "lock.try_shared": ("SELECT lock.try_shared(:lock_key, false) AS try_shared_1", K),
    "lock.unlock": ("SELECT lock.unlock(:lock_key) AS unlock_1", K),
    "lock.vacuum": ("SELECT lock.vacuum() AS vacuum_1", {}),
    "lock.create": ("SELECT lock.create(:keys) AS create_1", {"keys": [KEY, 7]}),
    "lock.session_exclusive": (
        f"SELECT CASE WHEN {GRANTS_NOTHING} THEN 'refused' ELSE pg_advisory_lock(:lock_key)::text END AS anon_1",
        K,
    ),
    "lock.session_unlock": ("SELECT pg_advisory_unlock(:lock_key) AS anon_1", K),
    "lock.row": (f"{ROW} FOR UPDATE OF document", {"pk_0": 7}),
    "lock.row mapped": (f"{MAPPED} FOR UPDATE OF letter", {"pk_0": 7}),
}
MYSQL: dict[str, tuple[str, dict[str, Any]]] = {
    "lock.unlock": ("SELECT NULL AS anon_1", {}),
    "lock.session_exclusive": (
        f"SELECT CASE WHEN {WRITABLE} THEN GET_LOCK({SESSION_NAME}, :seconds) ELSE 'refused' END AS anon_1",
        {**K, "seconds": 31_536_000},
    ),
    "lock.session_unlock": (f"SELECT RELEASE_LOCK({SESSION_NAME}) AS anon_1", K),
    "lock.row": (f"{ROW}{PRIMARY} FOR UPDATE", {"pk_0": 7}),
    "lock.row mapped": (f"{MAPPED}{PRIMARY} FOR UPDATE", {"pk_0": 7}),
}
WRITES_NOTHING = "DELETE FROM lock_locked_keys WHERE 0 = 1"
STATEMENTS = {
    "postgresql": POSTGRESQL,
    "yugabytedb": POSTGRESQL,
    "mysql": MYSQL,
    "mariadb": MYSQL,
    "sqlite": {
        "lock.exclusive": (WRITES_NOTHING, {}),
        "lock.exclusive stale": (WRITES_NOTHING, {}),
        "lock.shared": (WRITES_NOTHING, {}),
        "lock.unlock": ("SELECT NULL AS anon_1", {}),
        "lock.vacuum": ("SELECT 0", {}),
        "lock.create": ("SELECT 0", {}),
    },
}


def dialect_of(engine: str) -> Dialect:
    made: Dialect = create_engine(f"{URLS[engine]}://", paramstyle="named").dialect
    return made


def plain(statement: str) -> str:
    """Without line breaks, and without the casts that one driver needs and another doesn't."""
    for cast in ("BIGINT[]", "BIGINT", "INTEGER", "BOOLEAN"):
        statement = statement.replace(f"::{cast}", "")
    return " ".join(statement.split())


@pytest.mark.parametrize("operation", MAKE)
@pytest.mark.parametrize("engine", URLS)
def test_compile_returns_the_statement_or_a_reason(engine: str, operation: str) -> None:
    wanted = STATEMENTS[engine].get(operation)
    made = MAKE[operation]()
    if wanted is not None:
        compiled = made.compile(dialect=dialect_of(engine))
        assert (plain(str(compiled)), compiled.params) == wanted
        return
    with pytest.raises(CompileError) as refused:
        made.compile(dialect=dialect_of(engine))
    assert one_sentence(refused.value).startswith(f"{made.name} ")


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


def test_values_can_be_spelt_out() -> None:
    for engine, operation in (("postgresql", "lock.exclusive"), ("mariadb", "lock.session_exclusive")):
        compiled = MAKE[operation]().compile(dialect=dialect_of(engine), compile_kwargs={"literal_binds": True})
        assert str(KEY) in str(compiled)
        assert compiled.params == {}


def test_the_prefix_of_the_tables_is_an_option() -> None:
    operation = sl.lock.shared("a").execution_options(locks_prefix="mine_")
    assert "DELETE FROM mine_locked_keys" in str(operation.compile(dialect=dialect_of("sqlite")))


def test_another_schema_at_compile_time() -> None:
    compiled = sl.lock.shared("a").compile(
        dialect=dialect_of("postgresql"), schema_translate_map={"lock": "Other Schema"}, render_schema_translate=True
    )
    assert plain(str(compiled)) == 'SELECT "Other Schema".shared(:lock_key, false, :wait_ms) AS shared_1'


def test_compiling_twice_keeps_the_values_apart() -> None:
    one, two = sl.lock.exclusive(1), sl.lock.exclusive(2)
    dialect = dialect_of("postgresql")
    assert [op.compile(dialect=dialect).params["lock_key"] for op in (one, two, one)] == [1, 2, 1]


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb", "sqlite"])
def test_compiled_is_what_is_executed(engine_to: MakeEngine, name: str) -> None:
    """With the dialect of a live engine, which knows its server, wherever there is one statement."""
    engine = engine_to(name)
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

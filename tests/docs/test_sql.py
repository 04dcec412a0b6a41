"""The SQL that the pages show is the SQL that is executed."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import Dialect

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.shown import ID, shown

PAGES = [ROOT / "docs" / name for name in ("lock.md", "mutex.md", "timeout.md", "fencing.md", "capture.md", "queue.md")]
BLOCKS = [block for page in PAGES for block in blocks(page)]
URLS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql", "sqlite": "sqlite"}


def marked(kind: str, *, locks: bool | None = None) -> list[object]:
    """Return the blocks with a mark, and the words after it: one case for each engine that is named first."""
    cases: list[object] = []
    for block in BLOCKS:
        if block.mark.startswith(f"{kind}: "):
            engines, *words = block.mark.removeprefix(f"{kind}: ").split()
            if locks is None or words[0].startswith("lock.") == locks:
                cases += [
                    pytest.param(block, [engine, *words], id=" ".join((kind, engine, *words)))
                    for engine in engines.split(",")
                ]
    return cases


def plain(statement: str) -> str:
    """Return a statement without comments and line breaks, with uniform parameters."""
    statement = re.sub(r"^--.*$", "", statement, flags=re.M)
    statement = re.sub(r"%\((\w+)\)s", r":\1", statement)
    statement = re.sub(r"(:\w+)::[A-Z]+\b", r"\1", statement)
    # SQLAlchemy 2.1 compares a boolean with 1, where 2.0 uses it as the condition
    statement = re.sub(r"('READ-UNCOMMITTED'\)|read_only = 0) = 1\b", r"\1", statement)
    return re.sub(r"\s+", " ", statement).strip().removesuffix(";").strip()


def spelt_out(statement: str, parameters: Any) -> str:
    """Return a statement with the values of unnamed parameters, which aren't the caller's."""
    for name, value in dict(parameters).items():
        if re.search(r"_\d+$", name):
            literal = str(value).lower() if isinstance(value, bool) else repr(value)
            statement = re.sub(rf"%\({name}\)s(::\w+)?", literal, statement)
    return statement


def dialect(name: str) -> Dialect:
    made: Dialect = create_engine(f"{URLS[name]}://", paramstyle="named").dialect
    return made


@pytest.mark.parametrize(("block", "words"), marked("sql"))
def test_shown_sql_is_compiled_sql(block: Block, words: list[str]) -> None:
    engine, *operation = words
    compiled = shown(" ".join(operation)).compile(dialect=dialect(engine), compile_kwargs={"render_postcompile": True})
    assert plain(str(compiled)) == plain(block.text)


@pytest.mark.parametrize(("block", "words"), marked("file"))
def test_shown_sql_is_shipped_sql(block: Block, words: list[str]) -> None:
    assert block.text == (ROOT / "alembic_templates" / "sql" / words[0]).read_text()


@pytest.mark.parametrize(("block", "words"), marked("executed", locks=True))
def test_shown_sql_is_executed_sql(block: Block, words: list[str], servers: Servers) -> None:
    name, operation, state, *options = words
    engine = create_engine(servers.installed(name, PLAIN[name]), isolation_level="READ COMMITTED")
    key = next(_numbers)
    # executes the statements that are executed once per engine, and inserts the key's row
    with engine.begin() as connection:
        connection.execute(shown(operation, key if state == "known" else next(_numbers)))
    made = shown(operation, key).execution_options(**{"locks_wait": 5} if "wait" in options else {})
    assert executed(engine, made) == statements(block)
    engine.dispose()


@pytest.mark.parametrize(("block", "words"), marked("executed", locks=False))
def test_shown_row_sql_is_executed_sql(block: Block, words: list[str], servers: Servers) -> None:
    name, *operation = words
    made = shown(" ".join(operation))
    engine = create_engine(tasks_database(name, servers), isolation_level="READ COMMITTED")
    with engine.begin() as connection:
        if operation[0].endswith(".create"):
            connection.execute(sl.Mutex().create("other"))
        else:
            connection.execute(sl.Mutex().create(ID, "task_b"))
            connection.execute(sl.Timeout(every=3600).create(ID, "task_b"))
            connection.execute(sl.StateTransition().create(ID))
            connection.execute(sl.Queue().put({"to": "a@example.org"}, queue="mail"))
    assert executed(engine, made) == statements(block)
    engine.dispose()


def tasks_database(name: str, servers: Servers) -> str:
    """A database whose tasks only this module uses."""
    url = servers.fresh(name, PLAIN[name])
    install(url)
    return url


def executed(engine: Engine, operation: sl.Operation[Any]) -> list[str]:
    """Return the statements of an operation, executed in a transaction that is rolled back."""
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *called: seen.append(spelt_out(called[2], called[3])))
    with engine.connect() as connection:
        connection.execute(operation)
        connection.rollback()
    # a second connection works in the database of the first, which it names
    return [plain(statement.replace(f"{engine.url.database}.", "")) for statement in seen]


def statements(block: Block) -> list[str]:
    """Return the statements that a block shows."""
    shown_ = re.sub(r"^--.*$", "", block.text, flags=re.M).strip()
    return [plain(statement) for statement in shown_.split(";\n")]


def test_pages_have_sql_to_compare() -> None:
    for kind in ("sql", "file", "executed"):
        assert marked(kind), f"no block is marked <!-- {kind}: ... -->"
    for page in PAGES:
        assert any(block.mark.startswith("sql: ") for block in blocks(page)), f"{page.name} shows no SQL"


#: of keys that no other test uses
_numbers = itertools.count(-(2**62))

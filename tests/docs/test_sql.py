"""The SQL that docs/lock.md shows is the SQL that is executed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Dialect

import sqlalchemy_locks as sl

from ..conftest import PLAIN, Servers
from .pages import ROOT, Block, blocks

BLOCKS = blocks(ROOT / "docs" / "lock.md")
URLS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql", "sqlite": "sqlite"}


def marked(kind: str) -> list[object]:
    """The blocks whose mark begins so, with the words that follow."""
    return [
        pytest.param(block, block.mark.removeprefix(f"{kind}: ").split(), id=block.mark)
        for block in BLOCKS
        if block.mark.startswith(f"{kind}: ")
    ]


def plain(statement: str) -> str:
    """A statement without comments and line breaks, its parameters spelt alike, whatever the driver."""
    statement = re.sub(r"^--.*$", "", statement, flags=re.M)
    statement = re.sub(r"%\((\w+)\)s", r":\1", statement)
    statement = re.sub(r"(:\w+)::[A-Z]+\b", r"\1", statement)
    # SQLAlchemy 2.1 compares with 1 what 2.0 takes for the condition that it is
    statement = re.sub(r"('READ-UNCOMMITTED'\)|read_only = 0) = 1\b", r"\1", statement)
    return re.sub(r"\s+", " ", statement).strip().removesuffix(";").strip()


def spelt_out(statement: str, parameters: Any) -> str:
    """A statement with the values of those parameters that are not the caller's: they have no name of their own."""
    for name, value in dict(parameters).items():
        if re.search(r"_\d+$", name):
            literal = str(value).lower() if isinstance(value, bool) else repr(value)
            statement = re.sub(rf"%\({name}\)s(::\w+)?", literal, statement)
    return statement


def dialect(name: str) -> Dialect:
    made: Dialect = create_engine(f"{URLS[name]}://", paramstyle="named").dialect
    return made


@pytest.mark.parametrize(("block", "words"), marked("sql"))
def test_shown_is_what_it_compiles_to(block: Block, words: list[str]) -> None:
    engine, operation = words
    compiled = getattr(sl.lock, operation.removeprefix("lock."))("name").compile(dialect=dialect(engine))
    assert plain(str(compiled)) == plain(block.text)


@pytest.mark.parametrize(("block", "words"), marked("file"))
def test_shown_is_what_is_shipped(block: Block, words: list[str]) -> None:
    assert block.text == (ROOT / "alembic_templates" / "sql" / Path(*words)).read_text()


@pytest.mark.parametrize(("block", "words"), marked("executed"))
def test_shown_is_what_is_executed(block: Block, words: list[str], servers: Servers) -> None:
    name, operation, state, *options = words
    engine = create_engine(servers.installed(name, PLAIN[name]), isolation_level="READ COMMITTED")
    key = next(_numbers)
    make = getattr(sl.lock, operation.removeprefix("lock."))
    # so that what is executed once for an engine is out of the way, as is, for a known key, its insert
    with engine.begin() as connection:
        connection.execute(make(key if state == "known" else next(_numbers)))

    executed: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *seen: executed.append(spelt_out(seen[2], seen[3])))
    with engine.begin() as connection:
        connection.execute(make(key).execution_options(**{"locks_wait": 5} if "wait" in options else {}))
    engine.dispose()
    assert [plain(statement) for statement in executed] == [
        plain(statement) for statement in re.sub(r"^--.*$", "", block.text, flags=re.M).strip().split(";\n")
    ]


def test_something_is_compared() -> None:
    for kind in ("sql", "file", "executed"):
        assert marked(kind), f"no block of docs/lock.md is marked <!-- {kind}: ... -->"


_numbers = itertools.count(1)

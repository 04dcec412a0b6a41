"""``sl.fenced``: the row refuses the write of a holder that was paused for too long."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session, aliased

import sqlalchemy_locks as sl
from tests.fixtures.parties import ENGINES, EVERYWHERE, snapshot_isolation, unused
from tests.fixtures.task_models import Base, Import, imports

mutex = sl.Mutex()
metadata = MetaData()
pages = Table(
    "own_page",
    metadata,
    Column("book", String(40), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("body", String(40)),
    Column("fence", BigInteger),
)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """With the tables of an app."""
    Base.metadata.create_all(engine)
    metadata.create_all(engine)
    return engine


everywhere = pytest.mark.parametrize("name", [name for name in EVERYWHERE if name != "postgresql15-table"])
engines = pytest.mark.parametrize("name", ENGINES)


def page(engine: Engine, *numbers: int) -> str:
    book = unused("book")
    with engine.begin() as connection:
        connection.execute(pages.insert(), [{"book": book, "number": number} for number in numbers])
    return book


def bodies(engine: Engine, book: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.scalars(select(pages.c.body).where(pages.c.book == book).order_by(pages.c.number)))


def write(book: str, number: int, body: str, token: int) -> sl.Operation[Any]:
    statement = update(pages).where(pages.c.book == book, pages.c.number == number).values(body=body)
    return sl.fenced(statement, pages.c.fence, token)


@everywhere
def test_write_of_a_paused_holder_is_refused(id: str, engine: Engine, name: str) -> None:
    """A acquires the mutex and is paused; an operator releases it; B acquires it and writes; A resumes."""
    locks, book = sl.Locks(engine), page(engine, 1)
    stopped = locks.mutex.acquire_token(id)
    assert locks.run(mutex.release(id)) is True
    token = locks.mutex.acquire_token(id)
    assert stopped is not None
    assert token is not None
    assert locks.run(write(book, 1, "of B", token)) is True
    with pytest.raises(sl.StaleToken, match=f"the token {token}, has written") as caught:
        locks.run(write(book, 1, "of A", stopped))
    assert caught.value.token == token
    assert locks.run(write(book, 1, "of B again", token)) is True
    assert bodies(engine, book) == ["of B again"]
    assert locks.run(write(book, 2, "no row", token)) is False


@engines
def test_several_rows_are_written_together_or_not_at_all(engine: Engine, name: str) -> None:
    locks, book = sl.Locks(engine), page(engine, 1, 2, 3)
    assert locks.run(write(book, 2, "newer", 7)) is True
    all_pages = update(pages).where(pages.c.book == book).values(body="older")
    with pytest.raises(sl.StaleToken) as caught:
        locks.run(sl.fenced(all_pages, pages.c.fence, 5))
    assert caught.value.token == 7
    assert bodies(engine, book) == [None, "newer", None]
    either = update(pages).where(or_(pages.c.number == 1, pages.c.number == 2), pages.c.book == book).values(body="x")
    with pytest.raises(sl.StaleToken):
        locks.run(sl.fenced(either, pages.c.fence, 5))
    assert bodies(engine, book) == [None, "newer", None]
    assert locks.run(sl.fenced(all_pages, pages.c.fence, 7)) is True
    assert bodies(engine, book) == ["older"] * 3
    if not name.startswith("sqlite"):
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            with pytest.raises(sl.Unsupported, match="autocommit"):
                connection.execute(sl.fenced(all_pages, pages.c.fence, 9))


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_newer_token_hidden_by_an_old_snapshot_is_found(engine: Engine, name: str) -> None:
    locks, book = sl.Locks(engine), page(engine, 1, 2)
    with Session(engine) as session:
        assert session.scalars(select(pages.c.body).where(pages.c.book == book)).all() == [None, None]
        assert locks.run(write(book, 2, "newer", 7)) is True
        refused = sl.MustRollback if snapshot_isolation(engine) else sl.StaleToken
        with pytest.raises(refused):
            session.scalar(write(book, 2, "older", 5))
        with pytest.raises(refused):
            session.scalar(sl.fenced(update(pages).where(pages.c.book == book).values(body="x"), pages.c.fence, 5))
        session.rollback()


@engines
def test_loaded_objects_are_refreshed(engine: Engine, name: str) -> None:
    a, b = unused(), unused()
    with Session(engine) as session:
        session.scalar(imports.create(a, b))
        loaded, sister = session.scalars(select(Import).where(Import.name.in_([a, b])).order_by(Import.pk)).all()
        version = loaded.version
        written = update(Import).where(Import.pk == loaded.pk).values(body="mine", tries=Import.pk + 1)
        assert session.scalar(sl.fenced(written, Import.fence, 3)) is True
        assert (loaded.body, loaded.tries, loaded.fence, loaded.version) == ("mine", loaded.pk + 1, 3, version + 1)
        assert sister.body is None
        with pytest.raises(sl.StaleToken):
            session.scalar(sl.fenced(update(Import).where(Import.pk == loaded.pk).values(body="x"), Import.fence, 2))
        assert loaded.body == "mine"
        for value in (sister.pk, bindparam("which", sister.pk)):
            one = update(Import).where(Import.pk == value).values({Import.body: "yours"})
            assert session.scalar(sl.fenced(one, "fence", 4)) is True
        assert (sister.body, loaded.body) == ("yours", "mine")
        session.rollback()


@engines
def test_condition_on_an_alias_does_not_select_the_row(engine: Engine, name: str) -> None:
    book = page(engine, 1, 2)
    locks = sl.Locks(engine)
    one = update(pages).where(pages.c.book == book, pages.c.number == 2).values(body="newer")
    assert locks.run(sl.fenced(one, pages.c.fence, 9)) is True
    other = pages.alias()
    sneaky = (
        update(pages)
        .where(pages.c.book == book, other.c.book == book, other.c.number == 1)
        .values(body="late")
        .where(other.c.book == pages.c.book)
    )
    with pytest.raises(sl.StaleToken):
        locks.run(sl.fenced(sneaky, pages.c.fence, 5))
    assert bodies(engine, book) == [None, "newer"]


def test_invalid_input_is_refused() -> None:
    good = update(pages).where(pages.c.number == 1).values(body="x")
    for token, error in ((0, ValueError), (2**63, ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="fencing token"):
            sl.fenced(good, pages.c.fence, token)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="UPDATE"):
        sl.fenced(select(pages), pages.c.fence, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a column of own_page"):
        sl.fenced(good, Import.fence, 1)
    with pytest.raises(sl.Unsupported, match="RETURNING"):
        sl.fenced(good.returning(pages.c.body), pages.c.fence, 1)
    with pytest.raises((TypeError, ValueError)):
        sl.fenced(update(aliased(Import)).values(body="x"), Import.fence, 1)


def test_several_rows_in_sqlite_autocommit_are_refused(tmp_path: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/app.db", isolation_level="AUTOCOMMIT")
    metadata.create_all(engine)
    book = page(engine, 1, 2)
    with engine.connect() as connection, pytest.raises(sl.Unsupported, match="autocommit"):
        connection.execute(sl.fenced(update(pages).where(pages.c.book == book).values(body="x"), pages.c.fence, 1))
    engine.dispose()

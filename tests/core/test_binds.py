"""Sessions with several databases: a lock is sent to the engine of an UPDATE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, Update, insert, select
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlalchemy_locks as sl
from tests.conftest import install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import connected, seen, unused


class Base(DeclarativeBase):
    pass


class Elsewhere(DeclarativeBase):
    pass


class Book(Base):
    __tablename__ = "book"
    id: Mapped[int] = mapped_column(primary_key=True)


class Shelf(Elsewhere):
    __tablename__ = "shelf"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def two(servers: Any) -> Iterator[tuple[Engine, Engine]]:
    urls = [servers.fresh("sqlite", "pysqlite") for _ in range(2)]
    for url in urls:
        install(url)
    with connected(urls[0]) as one, connected(urls[1]) as other:
        for engine in (one, other):
            Base.metadata.create_all(engine)
            Elsewhere.metadata.create_all(engine)
            with engine.begin() as connection:
                connection.execute(insert(Book).values(id=1))
                connection.execute(insert(Shelf).values(id=1))
        yield one, other


def test_a_row_lock_uses_the_bind_of_its_mapper(two: tuple[Engine, Engine]) -> None:
    books, shelves = two
    with Session(binds={Base: books, Elsewhere: shelves}) as session:
        with seen(books) as at_books, seen(shelves) as at_shelves:
            session.scalar(sl.lock.row(Shelf, 1))
        assert (at_books, bool(at_shelves)) == ([], True)
        with seen(books) as at_books, seen(shelves) as at_shelves:
            session.scalar(sl.lock.row(Book, 1))
        assert (bool(at_books), at_shelves) == (True, [])


def test_a_key_goes_to_the_sessions_own_bind(two: tuple[Engine, Engine]) -> None:
    books, own = two
    with Session(own, binds={Base: books}) as session, seen(books) as at_books, seen(own) as at_own:
        session.execute(sl.lock.exclusive(unused()))
        assert (at_books, bool(at_own)) == ([], True)


def test_without_a_bind_it_is_asked_for(two: tuple[Engine, Engine]) -> None:
    books, shelves = two
    with Session(binds={Base: books, Elsewhere: shelves}) as session:
        with pytest.raises(UnboundExecutionError):
            session.execute(sl.lock.exclusive("a"))
        for arguments in ({"bind": shelves}, {"mapper": Shelf}, {"clause": select(Shelf)}):
            with seen(shelves) as at_shelves:
                session.execute(sl.lock.exclusive("a"), bind_arguments=arguments)
            assert at_shelves, arguments


def routing(writer: Any, reader: Any) -> type[Session]:
    """SQLAlchemy's documented recipe ("Custom Vertical Partitioning"), with one reader."""

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **kw: Any) -> Any:
            if self._flushing or isinstance(clause, (Update, Delete)):
                return writer
            return reader

    return RoutingSession


EVERY = [
    lambda: sl.lock.exclusive("a"),
    lambda: sl.lock.shared("a"),
    lambda: sl.lock.try_exclusive("a"),
    lambda: sl.lock.try_shared("a"),
    lambda: sl.lock.unlock("a"),
    lambda: sl.lock.vacuum(),
    lambda: sl.lock.create("a"),
    lambda: sl.lock.row(Book, 1),
    lambda: sl.lock.row(Book.__table__, 1),
]


@pytest.mark.parametrize("make", EVERY, ids=lambda make: make().name)
def test_a_splitting_session_sends_locks_to_the_writer(two: tuple[Engine, Engine], make: Any) -> None:
    writer, reader = two
    with routing(writer, reader)() as session, seen(writer) as written, seen(reader) as read:
        session.scalars(select(Book)).all()
        assert (bool(read), written) == (True, [])
        read.clear()
        session.execute(make())
        assert (read, bool(written)) == ([], True)


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_the_session_of_a_block_joins_the_locks_transaction(engine_to: MakeEngine, name: str) -> None:
    """However the session class routes: ``held.session`` works in the lock's own transaction."""
    engine = engine_to(name)
    maker = sessionmaker(engine, class_=routing(engine, engine))
    key = unused()
    with sl.Locks(maker).exclusive(key) as held:
        assert isinstance(held.session, maker.class_)
        assert held.session.scalar(sl.lock.try_exclusive(key)) is True
        assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]

"""Sessions with several databases: a lock is sent to the engine of an UPDATE."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, Update, event, insert, select
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.ext.horizontal_shard import ShardedSession, set_shard_id
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlalchemy_locks as sl
from tests.conftest import install
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
    lambda: sl.Queue().put({}),
    lambda: sl.Queue().capture(2),
    lambda: sl.Mutex().create("a"),
]


def test_a_splitting_session_sends_locks_to_the_writer(two: tuple[Engine, Engine]) -> None:
    writer, reader = two
    for make in EVERY:
        with routing(writer, reader)() as session, seen(writer) as written, seen(reader) as read:
            session.scalars(select(Book)).all()
            assert (bool(read), written) == (True, [])
            read.clear()
            session.execute(make())
            assert (read, bool(written)) == ([], True), make().name


def sharded(shards: Any) -> dict[str, Any]:
    """The arguments of a ShardedSession that sends what has no shard to all of them."""
    return {
        "shards": shards,
        "shard_chooser": lambda mapper, instance, clause=None: "other",
        "identity_chooser": lambda *_, **named: list(shards),
        "execute_chooser": lambda context: list(shards),
    }


def test_one_execution_reaches_one_shard(two: tuple[Engine, Engine]) -> None:
    one, other = two
    for make in EVERY:
        with ShardedSession(**sharded({"one": one, "other": other})) as session:
            with seen(other) as at_other, pytest.raises(sl.Unsupported, match=r"bind_arguments=.*set_shard_id"):
                session.execute(make())
            assert at_other == []
            session.rollback()
            for operation, named in (
                (make(), {"bind_arguments": {"shard_id": "other"}}),
                (make().options(set_shard_id("other")), {}),
                (make().execution_options(_sa_shard_id="other"), {}),
            ):
                with seen(one) as at_one, seen(other) as at_other:
                    session.execute(operation, **named)
                assert (at_one, bool(at_other)) == ([], True)
            session.rollback()


def test_one_execution_reaches_one_shard_of_an_async_session(two: tuple[Engine, Engine]) -> None:
    async def main() -> None:
        one, other = (create_async_engine(each.url.set(drivername="sqlite+aiosqlite")) for each in two)
        arguments = sharded({"one": one.sync_engine, "other": other.sync_engine})
        async with AsyncSession(sync_session_class=ShardedSession, **arguments) as session:
            with pytest.raises(sl.Unsupported, match="set_shard_id"):
                await session.scalar(sl.lock.try_exclusive("a"))
            await session.rollback()
            assert await session.scalar(sl.lock.try_exclusive("a"), bind_arguments={"shard_id": "one"})
        for engine in (one, other):
            await engine.dispose()

    asyncio.run(main())


def test_a_listener_may_execute_it_again_after_an_error(two: tuple[Engine, Engine]) -> None:
    with Session(two[0]) as session:

        @event.listens_for(session, "do_orm_execute")
        def again(state: Any) -> Any:
            with contextlib.suppress(sl.UnknownRow):
                state.invoke_statement(statement=sl.lock.row(Book, 2))
            return state.invoke_statement()

        assert session.scalar(sl.lock.row(Book, 1)) is not None


@pytest.mark.parametrize("name", ["postgresql15", "mysql"])
def test_the_session_of_a_block_joins_the_locks_transaction(engine: Engine) -> None:
    """However the session class routes: ``held.session`` works in the lock's own transaction."""
    maker = sessionmaker(engine, class_=routing(engine, engine))
    key = unused()
    with sl.Locks(maker).exclusive(key) as held:
        assert isinstance(held.session, maker.class_)
        assert held.session.scalar(sl.lock.try_exclusive(key)) is True
        assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]

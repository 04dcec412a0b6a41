"""What a hostile review found, held as it was mended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    CHAR,
    BigInteger,
    Boolean,
    Column,
    Engine,
    Enum,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    NullPool,
    Numeric,
    SmallInteger,
    String,
    Table,
    Uuid,
    create_engine,
    event,
    false,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column

import sqlalchemy_locks as sl
from tests.conditional.test_fencing import metadata, page, pages
from tests.conditional.test_lost_replies import final, in_the_clear, row
from tests.faults.drivers import sync
from tests.fixtures.parties import ENGINES, PATIENCE, connected, installed, later, unused
from tests.fixtures.task_models import Base, Import, Kind, imports

mutex = sl.Mutex()
engines = pytest.mark.parametrize("name", ENGINES)


@pytest.fixture
def engine(servers: Any, name: str) -> Iterator[Engine]:
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        Base.metadata.create_all(engine)
        metadata.create_all(engine)
        yield engine


def test_a_failed_commit_leaves_nothing_to_the_next_user(tmp_path: Any) -> None:
    """SQLite's COMMIT fails while somebody reads; SQLAlchemy then takes the transaction for ended."""
    engine = create_engine(f"sqlite:///{tmp_path}/app.db?timeout=0.05", pool_size=1, max_overflow=0)
    sl.metadata().create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE pay (what TEXT)")
    locks = sl.Locks(engine)
    locks.run(mutex.create("a"))
    reading = create_engine(f"sqlite:///{tmp_path}/app.db", poolclass=NullPool)
    with reading.connect() as reader:
        reader.exec_driver_sql("BEGIN")
        reader.exec_driver_sql("SELECT * FROM pay, lock_task_state").all()
        with pytest.raises((DBAPIError, sl.LockError)):
            with locks.exclusive("x") as held:
                held.session.execute(text("INSERT INTO pay VALUES ('paid')"))
        with pytest.raises((DBAPIError, sl.LockError)):
            locks.run(mutex.acquire("a"))
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pay").scalar() == 0
    assert locks.mutex.acquire("a") is True
    engine.dispose()


@engines
def test_a_capture_is_rolled_back_with_its_transaction(engine: Engine, name: str) -> None:
    queue = unused("queue")
    with Session(engine) as session, session.begin():
        session.scalar(mutex.create("a", "b", queue=queue, retries=1))
    with Session(engine) as session:
        assert session.scalars(mutex.capture(1, queue=queue)).all() == ["a"]
        session.rollback()
        assert session.scalar(mutex.acquire("a", queue=queue)) is True
        session.rollback()


@sync
def test_nobody_is_freed_by_a_release_after_an_unknown_acquisition(servers: Any, name: str, driver: str) -> None:
    id = unused()
    with connected(installed(servers, name), poolclass=NullPool) as direct:
        with in_the_clear(servers, name, driver) as (engine, proxy):
            a, b = sl.Locks(engine), sl.Locks(direct)
            a.run(mutex.create(id))
            proxy.lose_answer(final(name), always=True)
            with pytest.raises(sl.OutcomeUnknown):
                a.mutex.acquire(id)
            proxy.answer_all()
            assert b.run(mutex.release(id)) is True
            assert b.mutex.acquire(id) is True
            assert a.mutex.release(id) is False
            assert row(direct, id).acquired


@sync
def test_an_error_after_a_lost_answer_is_not_passed_on_as_if_it_were_one(servers: Any, name: str, driver: str) -> None:
    id = unused()
    with in_the_clear(servers, name, driver) as (engine, proxy):
        locks = sl.Locks(engine)
        locks.run(mutex.create(id))
        proxy.lose_answer(final(name), proxy.close)  # the server can't be reached any more
        with pytest.raises(sl.OutcomeUnknown):
            locks.mutex.acquire(id)
    with connected(installed(servers, name), poolclass=NullPool) as direct:
        assert row(direct, id).acquired


@sync
def test_retries_are_not_given_twice(servers: Any, name: str, driver: str) -> None:
    id = unused()
    with connected(installed(servers, name), poolclass=NullPool) as direct:
        with in_the_clear(servers, name, driver) as (engine, proxy):
            locks, other = sl.Locks(engine), sl.Locks(direct)
            locks.run(mutex.create(id, retries=0))
            proxy.lose_answer(final(name), lambda: other.mutex.acquire(id) and other.mutex.release(id))
            with pytest.raises(sl.OutcomeUnknown):
                locks.run(mutex.set_retries(id, 1))
            assert proxy.losses == 1
            assert other.mutex.acquire(id) is False


@pytest.mark.parametrize("type_", [CHAR(40), Uuid(as_uuid=False), String(32), Uuid()], ids=repr)
@sync
def test_a_nonce_is_known_again_whatever_its_column(servers: Any, name: str, driver: str, type_: Any) -> None:
    id = unused()
    own = Table(
        f"own_nonce_{abs(hash(repr(type_))) % 10**8}",
        MetaData(),
        Column("id", String(60), primary_key=True),
        Column("taken", Boolean, nullable=False),
        Column("nonce", type_),
    )
    mine = sl.Mutex(own, id=own.c.id, acquired=own.c.taken, token=own.c.nonce)
    with connected(installed(servers, name), poolclass=NullPool) as direct:
        own.create(direct, checkfirst=True)
        with in_the_clear(servers, name, driver) as (engine, proxy):
            locks = sl.Locks(engine)
            locks.run(mine.create(id))
            proxy.lose_answer(final(name))
            assert locks.run(mine.acquire(id)) is True
            assert proxy.losses == 1
            assert locks.run(mine.acquire(id)) is False


def test_columns_that_can_t_play_their_role() -> None:
    t = Table(
        "own_table",
        MetaData(),
        Column("id", Integer, primary_key=True),
        Column("flag", Boolean),
        Column("short", String(8)),
        Column("number", BigInteger),
        Column("name", String(40)),
        Column("real", Float),
        Column("small", SmallInteger),
        Column("five", Numeric(5, 2)),
    )
    for role, column in (
        ("token", "short"),
        ("token", "number"),
        ("owner", "number"),
        ("retries", "name"),
        ("fence", "name"),
        ("acquired_at", "name"),
    ):
        with pytest.raises(TypeError, match=role):
            sl.Mutex(t, id="id", acquired="flag", **{role: column})
    with pytest.raises(ValueError, match="two roles"):
        sl.Mutex(t, id="name", acquired="flag", owner="name")
    for column in ("real", "small", "five", "name"):
        with pytest.raises(TypeError, match="ts="):
            sl.Timeout(t, id="id", ts=column, every=10)
    for id in ("7", 7.0, True, [7]):
        with pytest.raises(TypeError, match="an id is int"):
            sl.Mutex(t, id="id", acquired="flag").acquire(id)
    with pytest.raises(TypeError, match="an id is str"):
        sl.Mutex(t, id="name", acquired="flag").acquire(7)
    for every in (10**19, float("inf")):
        with pytest.raises(ValueError, match="longer than any clock"):
            sl.Timeout(every=every)


@pytest.mark.parametrize("name", ["postgresql15", "sqlite"])
def test_an_index_over_some_of_the_rows_makes_none_unique(engine: Engine, name: str) -> None:
    t = Table(
        "own_partial",
        MetaData(),
        Column("pk", Integer, primary_key=True),
        Column("name", String(40)),
        Column("dead", Boolean, nullable=False),
        Column("locked", Boolean, nullable=False),
    )
    alive = t.c.dead == false()
    Index("own_partial_alive", t.c.name, unique=True, postgresql_where=alive, sqlite_where=alive)
    t.create(engine, checkfirst=True)
    own, id = sl.Mutex(t, id=t.c.name, acquired=t.c.locked), unused()
    with engine.begin() as connection:
        connection.execute(t.insert(), [{"name": id, "dead": True, "locked": True}])
        connection.execute(t.insert(), [{"name": id, "dead": False, "locked": False}])
    with pytest.raises(sl.Unsupported, match="unique constraint"):
        sl.Locks(engine).run(own.acquire(id))
    with engine.connect() as connection:
        assert connection.scalars(select(t.c.locked).where(t.c.name == id).order_by(t.c.pk)).all() == [True, False]


@engines
def test_a_condition_on_an_alias_is_not_one_on_the_row(engine: Engine, name: str) -> None:
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
    with engine.connect() as connection:
        found = connection.scalars(select(pages.c.body).where(pages.c.book == book).order_by(pages.c.number)).all()
    assert found == [None, "newer"]
    with pytest.raises((sl.Unsupported, TypeError, ValueError)):
        sl.fenced(update(aliased(Import)).values(body="x"), Import.fence, 1)


def test_several_rows_in_autocommit_of_sqlite(tmp_path: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/app.db", isolation_level="AUTOCOMMIT")
    metadata.create_all(engine)
    book = page(engine, 1, 2)
    with engine.connect() as connection, pytest.raises(sl.Unsupported, match="autocommit"):
        connection.execute(sl.fenced(update(pages).where(pages.c.book == book).values(body="x"), pages.c.fence, 1))
    engine.dispose()


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_what_is_decided_on_older_values_is_not_written(engine: Engine, name: str) -> None:
    """An acquisition raises the version; what it shows must then be what the row has, all of it."""
    a = unused()
    read_committed = engine.execution_options(isolation_level="READ COMMITTED")
    with Session(read_committed) as session:
        session.scalar(imports.create(a))
        session.commit()
        mine = session.scalars(select(Import).where(Import.name == a)).one()
        assert mine.body is None
        with Session(engine) as other, other.begin():
            other.scalars(select(Import).where(Import.name == a)).one().body = "sold"
        assert session.scalar(imports.acquire(a)) is True
        assert (mine.body, mine.locked) == ("sold", True)
        session.rollback()


def test_the_kind_of_a_row_in_another_table() -> None:
    class Root(DeclarativeBase):
        pass

    class Top(Root):
        __tablename__ = "top"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(String(20))
        __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "top"}

    class Joined(Top):
        __tablename__ = "joined"
        id: Mapped[int] = mapped_column(ForeignKey("top.id"), primary_key=True)
        locked: Mapped[bool]
        __mapper_args__ = {"polymorphic_identity": "joined"}

    with pytest.raises(ValueError, match="kept in another table"):
        sl.Mutex(Joined, id=Joined.id, acquired=Joined.locked)


@engines
def test_captures_of_enums_have_an_order(engine: Engine, name: str) -> None:
    t = Table(
        "own_enum",
        MetaData(),
        Column("id", Enum(Kind), primary_key=True),
        Column("taken", Integer, nullable=False),
    )
    t.create(engine, checkfirst=True)
    own = sl.Mutex(t, id=t.c.id, acquired=t.c.taken)
    with Session(engine) as session:
        session.scalar(own.create(*Kind))
        session.execute(update(t).where(t.c.id == Kind.SMS).values(taken=2))
        assert session.scalars(own.capture(9)).all() == [Kind.MAIL]  # 2 isn't free
        assert session.scalar(own.release(Kind.SMS)) is True
        assert session.scalars(own.capture(9)).all() == [Kind.SMS]
        session.rollback()


@engines
def test_columns_under_another_name(engine: Engine, name: str) -> None:
    t = Table(
        "own_renamed",
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("body_txt", String(20), key="body"),
        Column("fence", BigInteger),
    )
    t.create(engine, checkfirst=True)
    with Session(engine) as session:
        session.execute(t.delete())
        session.execute(t.insert().values(id=1))
        for values in ({"body": "x"}, {t.c.body: "x"}):
            statement = update(t).where(t.c.id == 1).values(values)
            assert session.scalar(sl.fenced(statement, "fence", 1)) is True
        ordered = update(t).where(t.c.id == 1).ordered_values((t.c.body, "x"))
        with pytest.raises((sl.Unsupported, InvalidRequestError)):
            session.scalar(sl.fenced(ordered, t.c.fence, 1))
        session.rollback()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_app_whose_connect_event_leaves_a_transaction_open(servers: Any, driver: str) -> None:
    with connected(installed(servers, "postgresql15", driver)) as engine:

        @event.listens_for(engine, "connect")
        def connect(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("SELECT 1")
            cursor.close()

        locks = sl.Locks(engine)
        assert locks.mutex.acquire(unused()) is True
        assert locks.once_per(unused(), every=60) is True


def test_a_transaction_that_has_read_must_roll_back(tmp_path: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/app.db?timeout=5", poolclass=NullPool)
    sl.metadata().create_all(engine)
    sl.Locks(engine).run(mutex.create("a"))
    with engine.connect() as reader, engine.connect() as writer:
        reader.exec_driver_sql("BEGIN")
        reader.exec_driver_sql("SELECT * FROM lock_task_state").all()
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(sl.MustRollback):
            reader.execute(mutex.acquire("a"))
        reader.rollback()
        writer.rollback()


@pytest.mark.parametrize("name", ENGINES)
def test_a_connection_goes_back_clean_without_another_round_trip(servers: Any, name: str) -> None:
    """COMMIT, or autocommit, was the last thing: the pool resets nothing, and nothing is open."""
    with connected(installed(servers, name), pool_size=1, max_overflow=0) as engine:
        locks, resets = sl.Locks(engine), []
        locks.run(mutex.create(unused()))

        @event.listens_for(engine, "reset")
        def reset(connection: Any, record: Any, state: Any) -> None:
            resets.append(state.transaction_was_reset)

        id = unused()
        assert locks.mutex.acquire(id) is True
        assert locks.mutex.release(id) is True
        assert resets[-2:] == [True, True]
        with engine.connect() as connection:
            raw: Any = connection.connection.driver_connection
            if name == "postgresql15":
                assert raw.info.transaction_status == 0
                assert not raw.autocommit
            elif name == "sqlite":
                assert not raw.in_transaction
            else:
                assert not raw.server_status & 1  # SERVER_STATUS_IN_TRANS
            assert not connection.in_transaction()
            with connection.begin():
                assert connection.execute(mutex.acquire(id)).scalar() is True
        assert len(resets) >= 3


@pytest.mark.parametrize("immediate", [False, True])
def test_nowait_on_sqlite_waits_for_nobody_who_writes(immediate: bool, tmp_path: Any) -> None:
    """Not for the beginning of its transaction, either: with begin_immediate that is where the wait is."""
    with connected(f"sqlite:///{tmp_path}/app.db", connect_args={"timeout": 600}) as engine:
        sl.metadata().create_all(engine)
        if immediate:
            sl.sqlite.begin_immediate(engine)
        timeout, locks = sl.Timeout(every=60), sl.Locks(engine)
        locks.run(mutex.create("a"))
        locks.run(timeout.create("a"))
        with engine.connect() as writer:
            if not immediate:
                writer.exec_driver_sql("BEGIN IMMEDIATE")
            assert writer.scalar(mutex.acquire("a")) is True
            for operation, expected in (
                (mutex.acquire("a", nowait=True), False),
                (timeout.acquire("a", nowait=True), False),
                (mutex.acquire_token("a", nowait=True), None),
            ):
                assert later(locks.run, operation).result(PATIENCE) is expected
            writer.rollback()
        assert locks.run(mutex.acquire("a", nowait=True)) is True
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 600_000

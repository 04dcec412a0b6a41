"""Tables whose names could be those of CTEs in the statements."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers


@pytest.mark.parametrize("engine", ["postgresql15", "sqlite"])
@pytest.mark.parametrize("called", ["free", "due", "clock", "kept", "held", "setting", "bounded"])
def test_table_named_like_a_cte_of_the_statements(servers: Servers, engine: str, called: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Row(Base):
        __tablename__ = called
        now: Mapped[str] = mapped_column(primary_key=True)
        acquired: Mapped[bool] = mapped_column(default=False)
        ts: Mapped[int] = mapped_column(default=0)
        timeout: Mapped[int] = mapped_column(default=60)

    made = create_engine(servers.installed(engine, PLAIN[engine]), poolclass=NullPool)
    Base.metadata.drop_all(made)
    Base.metadata.create_all(made)
    try:
        mutex = sl.Mutex(Row, id=Row.now, acquired=Row.acquired)
        timeout = sl.Timeout(Row, id=Row.now, ts=Row.ts, timeout=Row.timeout)
        with Session(made) as session, session.begin():
            session.add_all([Row(now=each) for each in "abc"])
        with Session(made) as session, session.begin():
            assert session.scalar(mutex.acquire("a", nowait=True)) is True
            assert session.scalars(mutex.capture(5)).all() == ["b", "c"]
            assert session.scalar(mutex.acquire("a")) is False
            assert session.scalar(timeout.acquire("a")) is True
            assert session.scalar(timeout.acquire("a", nowait=True)) is False
            assert session.scalars(timeout.capture(5)).all() == ["b", "c"]
    finally:
        Base.metadata.drop_all(made)
        made.dispose()

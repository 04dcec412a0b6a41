"""A claim is never issued twice, even after a rollback: a worker that lost its capture can't end another's."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, Integer, SmallInteger
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlalchemy_locks as sl
from sqlalchemy_locks.captures.claims import draw_claim
from tests.fixtures.queues import put


def test_a_rolled_back_capture_ends_no_job(engine: Engine) -> None:
    queue = sl.Queue()
    put(engine, 1)
    with Session(engine) as first, Session(engine) as second:
        lost = first.execute(queue.capture()).all()
        first.rollback()
        (mine,) = second.execute(queue.capture()).all()
        second.commit()
        assert first.scalar(queue.fail(lost, error="rolled back")) == 0
        assert first.scalar(queue.complete(lost)) == 0
        first.commit()
        assert second.execute(queue.capture()).all() == []
        assert second.scalar(queue.complete(mine)) == 1
        second.commit()


def test_one_operation_draws_a_claim_each_time(engine: Engine) -> None:
    """Also when the driver's own cursor executes it, with a cached statement and its values."""
    queue = sl.Queue()
    operation = queue.capture()
    fetching = queue._fetch(1, queue="default", host="here")
    put(engine, *range(4))
    with engine.connect() as connection:
        claims = [connection.execute(operation).one().claim for _ in range(2)]
        claims += [connection.execute(fetching).one().claim for _ in range(2)]
        connection.rollback()
    assert len(set(claims)) == 4
    assert all(0 < claim < 2**63 for claim in claims)


def test_a_rolled_back_capture_sets_no_status(engine: Engine) -> None:
    tasks = sl.StateTransition()
    with Session(engine) as first, Session(engine) as second:
        first.scalar(tasks.create("a"))
        first.commit()
        (lost,) = first.execute(tasks.capture()).all()
        first.rollback()
        (mine,) = second.execute(tasks.capture()).all()
        second.commit()
        assert first.scalar(tasks.set_status(lost, "failed")) is False
        first.commit()
        assert second.scalar(tasks.set_status(mine, "done")) is True
        second.commit()


def test_a_claim_fits_its_column() -> None:
    class Base(DeclarativeBase):
        pass

    class Import(Base):
        __tablename__ = "imports"
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str]
        word: Mapped[str]
        small: Mapped[int] = mapped_column(SmallInteger())
        middle: Mapped[int] = mapped_column(Integer())
        large: Mapped[int] = mapped_column(BigInteger())

    table: Any = Import.__table__
    assert 0 < max(draw_claim(table.c.middle) for _ in range(100)) < 2**31
    assert max(draw_claim(table.c.large) for _ in range(100)) > 2**31
    with pytest.raises(TypeError, match="must be BigInteger or Integer"):
        sl.StateTransition(Import, id=Import.id, status=Import.status, claim=Import.small)
    with pytest.raises(TypeError, match="must be Integer"):
        sl.StateTransition(Import, id=Import.id, status=Import.status, claim=Import.word)

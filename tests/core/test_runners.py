"""An operation is a value: a Session, a Connection and Locks get the same result, however often they execute it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.parties import ASYNC, ENGINES, async_connected, installed, unused


@pytest.mark.parametrize("name", ENGINES)
def test_each_way_of_a_connection_and_a_session(engine: Engine) -> None:
    operation = sl.lock.try_exclusive(unused())
    with engine.begin() as connection:
        assert connection.execute(operation).scalar() is True
        assert connection.execute(operation).all() == [(True,)]
        assert connection.scalar(operation) is True
        assert connection.scalars(operation).one() is True
        assert connection.scalar(sl.lock.exclusive(unused())) is None
    with Session(engine) as session, session.begin():
        assert session.execute(operation).scalar_one() is True
        assert session.execute(operation).one() == (True,)
        assert session.scalar(operation) is True
        assert session.scalars(operation).all() == [True]
        assert session.scalar(sl.lock.shared(unused())) is None
        assert session.connection().scalar(operation) is True


@pytest.mark.parametrize(("name", "driver"), ASYNC.values(), ids=ASYNC)
def test_each_way_of_their_async_twins(servers: Any, name: str, driver: str) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, name, driver)) as engine:
            operation = sl.lock.try_exclusive(unused())
            async with engine.begin() as connection:
                assert (await connection.execute(operation)).scalar() is True
                assert await connection.scalar(operation) is True
                assert (await connection.scalars(operation)).all() == [True]
                assert await connection.run_sync(lambda sync: sync.scalar(operation)) is True
            async with AsyncSession(engine) as session, session.begin():
                assert (await session.execute(operation)).scalar_one() is True
                assert await session.scalar(operation) is True
                assert (await session.scalars(operation)).one() is True
                assert await session.scalar(sl.lock.exclusive(unused())) is None
                assert await session.run_sync(lambda sync: sync.scalar(operation)) is True
                async with engine.begin() as other:
                    assert await other.scalar(operation) is False

    asyncio.run(main())


def test_repr_shows_name_and_values() -> None:
    operation = sl.lock.exclusive("a")
    assert repr(operation) == str(operation) == "<lock.exclusive(lock_key=-3848465438864589366, lock_name='a')>"
    assert operation.name == "lock.exclusive"
    assert repr(sl.lock.vacuum()) == "<lock.vacuum()>"
    assert repr(sl.lock.create(2, 1, 2)) == "<lock.create(keys=[1, 2])>"


def test_an_operation_has_no_truth_of_its_own() -> None:
    """``if sl.lock.try_exclusive("a"):`` executes nothing, so it must raise and not be true."""
    with pytest.raises(TypeError):
        bool(sl.lock.try_exclusive("a"))

"""``locks.run`` returns captured rows as a list, entities detached and readable."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import NullPool, inspect, select
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.parties import ENGINES, connected, installed
from tests.fixtures.task_models import Animal, Base


@pytest.mark.parametrize("name", ENGINES)
def test_captures_through_locks(servers: Any, name: str) -> None:
    with connected(installed(servers, name), poolclass=NullPool) as engine:
        Base.metadata.create_all(engine)
        locks = sl.Locks(engine)
        with Session(engine) as session, session.begin():
            session.add_all([Animal(caged=False), Animal(caged=False)])
        taken = locks.run(
            sl.capture(Animal, where=Animal.caged.is_(False), values={"caged": True}, order_by=Animal.id, limit=5)
        )
        assert len(taken) == 2
        assert all(inspect(each).detached and each.caged is True for each in taken)
        with Session(engine) as session:
            assert session.scalars(select(Animal.caged).where(Animal.id.in_([each.id for each in taken]))).all() == [
                True,
                True,
            ]

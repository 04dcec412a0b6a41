"""Two-phase transactions: MySQL and MariaDB may release locks at PREPARE, before the COMMIT."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, update
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from tests.fixtures.parties import INNODB, unused

PAGE = Table("two_phase_page", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer))


@pytest.mark.parametrize("name", INNODB)
def test_locks_of_the_transaction_are_refused(engine: Engine) -> None:
    key = unused()
    PAGE.create(engine, checkfirst=True)
    locks = sl.Locks(engine)
    locks.run(sl.semaphore.create(key, 1))
    grant = locks.acquire({key: 1}, ttl=60)
    makes: list[Any] = [sl.lock.exclusive, sl.lock.shared, sl.lock.try_exclusive, sl.lock.try_shared]
    operations = [make(key) for make in makes]
    operations += [sl.lock.row(PAGE, 1), sl.guarded(update(PAGE).values(n=1), grant)]
    for operation in operations:
        with Session(engine, twophase=True) as session, pytest.raises(sl.Unsupported, match="end at PREPARE"):
            session.execute(operation)
    with Session(engine, twophase=True) as session:
        session.execute(sl.Queue().put(key, ["kept by its row"]))
        session.commit()
    with locks.exclusive(key) as held:
        assert held.session.scalar(sl.lock.try_exclusive(key)) is True
    PAGE.drop(engine)

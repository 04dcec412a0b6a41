"""``locks_wait=0``: one attempt, in the mode that was asked for."""

from __future__ import annotations

import pytest

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import EVERYWHERE, unused


@pytest.mark.parametrize("name", EVERYWHERE)
def test_zero_wait_acquires_only_what_is_free(engine_to: MakeEngine, name: str) -> None:
    key, engine = sl.lock.key(unused()), engine_to(name)
    exclusive, shared = (make(key).execution_options(locks_wait=0) for make in (sl.lock.exclusive, sl.lock.shared))
    sl.Locks(engine).run(sl.lock.create(key))
    with engine.connect() as one, engine.connect() as two:
        assert one.scalar(shared) is None
        if name != "sqlite":
            assert two.scalar(shared) is None
            two.rollback()
        with pytest.raises(sl.LockTimeout, match=str(key)):
            two.execute(exclusive)
        one.rollback()
        two.rollback()
        assert one.scalar(exclusive) is None
        with pytest.raises(sl.LockTimeout, match=str(key)):
            two.execute(shared)

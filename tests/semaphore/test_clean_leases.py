"""The rows that a lease creates are removed when it is unused; its fencing tokens continue to increase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.semaphore.admin import create_for_lease
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.engines import MakeEngine
from tests.fixtures.parties import PATIENCE, all_of, connected, later
from tests.fixtures.semaphores import ENGINES, SERVERS, despite_deadlocks, place, unused


@pytest.fixture(scope="module")
def apart(servers: Servers) -> Callable[[str], str]:
    """A database of its own: the semaphores of other tests must begin with the token 1."""

    @cache
    def url(name: str) -> str:
        engine, _, locking = name.partition("-")
        made = servers.fresh(engine, PLAIN[engine])
        install(made, locking=locking or "native")
        return made

    return url


@pytest.fixture
def engine_to(apart: Callable[[str], str]) -> Iterator[MakeEngine]:
    with ExitStack() as opened:
        yield lambda name, **options: opened.enter_context(connected(apart(name), **options))


OLD = "2020-01-01 00:00:00.000000"


def leased(engine: Engine, name: str) -> int:
    """Use a lease once; return its fencing token."""
    with sl.Locks(engine).lease(name, ttl=3600, timeout=PATIENCE) as grant:
        return int(grant.fence[name])


def aged(engine: Engine, *names: str) -> None:
    """Move their last use years into the past, and clean up their requests."""
    for name in names:
        statement = f"UPDATE {place(engine, 'semaphore')} SET updated_at = :old WHERE name = :name"
        assert despite_deadlocks(engine, statement, old=OLD, name=name) == 1
    while sl.Locks(engine).run(sl.semaphore.clean(older_than=0)):
        pass


def cleaned(engine: Engine) -> None:
    while sl.Locks(engine).run(sl.semaphore.clean_leases()):
        pass


def there(engine: Engine, *names: str) -> list[str]:
    """The semaphores that have a row, of those given."""
    with engine.connect() as connection:
        found = set(connection.execute(text(f"SELECT name FROM {place(engine, 'semaphore')}")).scalars())
    return [name for name in names if name in found]


@pytest.mark.parametrize("name", ENGINES)
def test_only_unused_leases_are_removed(locks: sl.Locks, engine: Engine) -> None:
    unused_, recent, held, resized, confirmed, created, adopted, deleted = (unused("lease") for _ in range(8))
    for each in (unused_, recent, held, resized, confirmed, adopted, deleted):
        leased(engine, each)
    grant = locks.acquire({held: 1})
    assert locks.run(sl.semaphore.resize(resized, 2)) == 1
    assert locks.run(sl.semaphore.resize(confirmed, 1)) == 1
    locks.run(sl.semaphore.create(created, 1))
    assert locks.run(sl.semaphore.create(adopted, 1)) is False
    locks.run(sl.semaphore.delete(deleted))
    aged(engine, unused_, held, resized, confirmed, created, adopted, deleted)
    cleaned(engine)
    assert there(engine, unused_) == []
    # a deleted one has its row until its record is cleaned up
    kept = [recent, held, resized, confirmed, created, adopted, deleted]
    assert there(engine, *kept) == kept
    locks.run(sl.semaphore.clean_history(older_than=0))
    cleaned(engine)
    assert there(engine, *kept) == kept[:-1]
    assert locks.release(grant) is sl.Released.RELEASED
    # only create() records who made it
    assert locks.run(sl.semaphore.create(unused_, 3)) is True
    aged(engine, unused_)
    cleaned(engine)
    assert there(engine, unused_) == [unused_]


@pytest.mark.parametrize("name", ENGINES)
def test_fences_continue_after_a_removal(engine: Engine) -> None:
    one, other = unused("lease"), unused("lease")
    for number in range(1, 4):
        token = leased(engine, one)
        assert token >= number
    aged(engine, one)
    cleaned(engine)
    assert there(engine, one) == []
    assert leased(engine, one) > token
    # so does a new name: the greatest token of all removed rows is kept once for all names
    assert leased(engine, other) > token
    with engine.begin() as connection:
        assert connection.scalar(sl.semaphore.create(unused("made"), 1)) is True


@pytest.mark.parametrize("name", ENGINES)
def test_removal_of_smaller_fence_keeps_the_greatest(engine: Engine) -> None:
    """A lease that was used less, and is removed later."""
    often, seldom = unused("lease"), unused("lease")
    leased(engine, seldom)
    token = [leased(engine, often) for _ in range(3)][-1]
    for each in (often, seldom):
        aged(engine, each)
        cleaned(engine)
    assert there(engine, often, seldom) == []
    assert leased(engine, often) > token


@pytest.mark.parametrize("name", ENGINES)
def test_remembered_request_prevents_removal(locks: sl.Locks, engine: Engine) -> None:
    """A repeated id gets the state of its request, and the semaphores that it was for."""
    sem, ident = unused("lease"), unused("job")
    leased(engine, sem)
    locks.acquire({sem: 1}, external_id=ident)
    locks.release(ident)
    statement = f"UPDATE {place(engine, 'semaphore')} SET updated_at = :old WHERE name = :name"
    despite_deadlocks(engine, statement, old=OLD, name=sem)
    cleaned(engine)
    with pytest.raises(sl.RequestOver):
        locks.acquire({sem: 1}, external_id=ident, timeout=0)


@pytest.mark.parametrize("name", SERVERS)
def test_locked_lease_is_skipped(engine: Engine) -> None:
    sem = unused("lease")
    leased(engine, sem)
    aged(engine, sem)
    with engine.connect() as acquirer:
        grant = acquirer.scalar(sl.semaphore.acquire({sem: 1}))
        assert grant
        later(cleaned, engine).result(PATIENCE)
        acquirer.commit()
    assert there(engine, sem) == [sem]
    assert sl.Locks(engine).release(grant) is sl.Released.RELEASED


@pytest.mark.parametrize("name", SERVERS)
def test_lease_used_since_look_stays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy_locks.semaphore.sweep import CleanLeases

    sem, tokens = unused("lease"), list[int]()
    leased(engine, sem)
    aged(engine, sem)
    remove = CleanLeases._remove

    def late(self: Any, run: Any, made: Any, judged: dict[int, int]) -> int:
        if not tokens:
            tokens.append(leased(engine, sem))
        return remove(self, run, made, judged)

    monkeypatch.setattr(CleanLeases, "_remove", late)
    cleaned(engine)
    assert tokens
    assert there(engine, sem) == [sem]


@pytest.mark.parametrize("name", SERVERS)
def test_creation_prevents_removal_of_others(engine: Engine) -> None:
    """Its tokens begin above all removed ones, so none is removed between that read and its commit."""
    sem, new = unused("lease"), unused("lease")
    leased(engine, sem)
    aged(engine, sem)
    with engine.connect() as maker:
        assert maker.scalar(create_for_lease(new)) is True
        later(cleaned, engine).result(PATIENCE)
        assert there(engine, sem) == [sem]
        maker.commit()
    cleaned(engine)
    assert there(engine, sem, new) == [new]


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("name", SERVERS)
def test_removal_after_snapshot(name: str, create: bool, engine_to: MakeEngine) -> None:
    """The snapshot doesn't show the last token: tokens increase nevertheless, or it fails to serialize."""
    engine = engine_to(name, isolation_level="REPEATABLE READ")
    sem = unused("lease")
    for _ in range(3):
        token = leased(engine, sem)
    aged(engine, sem)
    with engine.connect() as old:
        old.execute(sl.semaphore.usage()).all()
        cleaned(engine)
        assert there(engine, sem) == []
        try:
            old.scalar(sl.semaphore.create(sem, 1) if create else create_for_lease(sem))
            old.commit()
        except (DBAPIError, sl.MustRollback) as error:
            if isinstance(error, DBAPIError) and not backend_for(engine.dialect).is_conflict(error):
                raise
            old.rollback()
    assert leased(engine, sem) > token


@pytest.mark.parametrize("name", ENGINES)
def test_leases_work_during_removals(name: str, engine_to: MakeEngine) -> None:
    """Tokens of a name never decrease and never repeat, however often it is removed in between."""
    engine = engine_to(name, pool_size=10)
    names, turns = [unused("lease") for _ in range(2)], 12
    tokens: dict[str, list[int]] = {each: [] for each in names}
    over = threading.Event()

    def work() -> None:
        locks = sl.Locks(engine)
        for turn in range(turns):
            name = names[turn % 2]
            with locks.lease(name, ttl=3600, timeout=PATIENCE) as grant:
                tokens[name].append(grant.fence[name])

    def clean() -> None:
        locks = sl.Locks(engine)
        while not over.is_set():
            locks.run(sl.semaphore.clean(older_than=0))
            locks.run(sl.semaphore.clean_leases(older_than=0))

    cleaning = later(clean)
    try:
        all_of(work, work, work)
    finally:
        over.set()
        cleaning.result(PATIENCE)
    for found in tokens.values():
        assert len(found) == 3 * turns // 2
        # recorded by the holders, in the order in which they held it
        assert found == sorted(set(found))

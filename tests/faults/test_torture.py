"""A short run of what ``make torture`` does for longer: drawn clients under drawn faults, judged by all checkers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade.exclusive import KeyBlock
from tests.conftest import PLAIN, Servers, install
from tests.faults.arena import Arena
from tests.faults.space import DRIVERS, PROCESS, SERIES, Config, Episode, Fault, draw
from tests.fixtures.parties import PATIENCE

#: how many episodes each engine gets here, each with a config of its own
EPISODES = 3


@pytest.fixture
def arena(servers: Servers) -> Iterator[Callable[[str], Arena]]:
    made: list[Arena] = []

    def make(engine: str) -> Arena:
        name = servers.database(engine)
        install(servers.url(engine, PLAIN[engine], name))
        made.append(Arena(engine, lambda driver: servers.url(engine, driver, name), PLAIN[engine]))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What drivers and the pool log about connections that are cut."""
    for name in ("asyncmy", "asyncio", "sqlalchemy.pool"):
        caplog.set_level(logging.CRITICAL + 1, name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("engine", DRIVERS)
def test_promises_hold_under_faults(arena: Callable[[str], Arena], engine: str) -> None:
    place = arena(engine)
    for seed in range(0, EPISODES * SERIES, SERIES):
        outcome = place.run(draw(seed, engine, steps=8))
        assert not outcome.violations, f"seed {seed}: {outcome.violations}"
        assert outcome.history.operations >= outcome.episode.steps / 2


def test_promises_hold_when_clients_die(arena: Callable[[str], Arena]) -> None:
    # the seed's own face is another one, which alone can cancel
    steps = tuple(step for step in draw(7, "sqlite", steps=16).clients[0] if step["what"] != "cancelled")
    config = Config("sqlite", "pysqlite", "Locks", processes=True)
    faults = tuple(Fault(what, 0.02) for what in PROCESS)
    outcome = arena("sqlite").run(Episode(7, config, (steps, steps), faults))
    assert not outcome.violations
    assert outcome.faults == dict.fromkeys(PROCESS, 1)


def test_seed_gives_the_same_episode() -> None:
    first, again = (draw(42, "mysql", own_server=True, processes=True) for _ in range(2))
    assert first == again
    assert draw(43, "mysql") != draw(42, "mysql")


def test_planted_bug_is_found(arena: Callable[[str], Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"what": "block", "keys": [0], "shared": False, "timeout": 5, "body": ["write"], "end": "commit"}
    config = Config("postgresql15", "psycopg", "Locks")
    episode = Episode(1, config, ((block,) * 2, (block,) * 2))
    place = arena("postgresql15")
    assert place.run(episode).violations == []
    both = threading.Barrier(2)
    blocks = import_module("sqlalchemy_locks.facade.exclusive")

    def acquire_nothing(key: int, **_: bool) -> Any:
        both.wait(PATIENCE)
        return sl.lock.unlock(key)

    monkeypatch.setattr(KeyBlock, "_queue_and_acquire", lambda self, *_: self._attempt(None, None))
    monkeypatch.setattr(blocks, "acquire", acquire_nothing)
    # a busy machine may let one block end before the other goes on
    outcomes = (place.run(episode) for _ in range(100))
    assert any(found.checker == "exclusion" for outcome in outcomes for found in outcome.violations)

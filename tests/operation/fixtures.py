"""The fixtures that several folders share; their ``conftest.py`` takes them from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, bindparam, text

from sqlalchemy_locks.dialects import base, mariadb, mysql, postgresql, sqlite_line

from .parties import PATIENCE, Watch, connected, installed

MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine_to(servers: Any) -> Iterator[MakeEngine]:
    """Engines to the databases with the locks: ``engine_to("mysql", isolation_level=...)``."""
    with ExitStack() as opened:

        def make(name: str, driver: str | None = None, **options: Any) -> Engine:
            return opened.enter_context(connected(installed(servers, name, driver), **options))

        yield make


@pytest.fixture
def watch(servers: Any) -> Iterator[Callable[[str], Watch]]:
    """The server's own account of who waits: ``watch("mysql").until_waiting()``."""
    made: list[Watch] = []

    def make(name: str) -> Watch:
        made.append(Watch(servers, name))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a timeout asks about who has it is answered, however busy the machine is: a second is its limit, else."""
    limit = text(f"SELECT set_config('statement_timeout', '{PATIENCE}s', true)")
    monkeypatch.setattr(postgresql, "_BRIEF", limit)
    monkeypatch.setattr(mysql.MySQL, "limit", ("max_execution_time", PATIENCE * 1000))
    monkeypatch.setattr(mariadb.MariaDB, "limit", ("max_statement_time", PATIENCE))


@pytest.fixture
def never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in front of a server's line keeps its place, be it that its thread stands still for a while."""
    cut_after(PATIENCE, monkeypatch)


def cut_after(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server cut off whoever is silent in front of its line for so long."""
    join = postgresql._JOIN.text.replace(f"'{base.IDLE}s'", f"'{seconds}s'")
    idle = mysql._IDLE.text.replace(f"wait_timeout = {base.IDLE}", f"wait_timeout = {seconds}")
    limit = postgresql._LIMIT.text.replace(f"'{base.IDLE}s'", f"'{seconds}s'")
    assert join != postgresql._JOIN.text
    assert limit != postgresql._LIMIT.text
    assert idle != mysql._IDLE.text
    monkeypatch.setattr(postgresql, "_JOIN", text(join).bindparams(bindparam("key", type_=BigInteger())))
    monkeypatch.setattr(postgresql, "_LIMIT", text(limit))
    monkeypatch.setattr(mysql, "_IDLE", text(idle))
    monkeypatch.setattr(sqlite_line, "IDLE", float(seconds))

"""The fixtures that several folders share; their ``conftest.py`` takes them from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine

from .parties import Watch, connected, installed

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

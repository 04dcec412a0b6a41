"""The conformance suite that users run, on every engine, with a schema or prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.testing.conformance import *  # noqa: F403
from tests.conftest import PLAIN, Servers
from tests.fixtures.parties import EVERYWHERE, connected


@pytest.fixture(scope="module", params=[*PLAIN])
def engine_of_the_app(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Engine]:
    """An app's engine, whose tables are in a schema and under a prefix of its own."""
    options = {"schema_translate_map": {"lock": "locks_of_mine"}, "locks_prefix": "my_"}
    url = servers.fresh(request.param, EVERYWHERE[request.param])
    with connected(url, execution_options=options) as engine:
        sl.metadata(schema="locks_of_mine", prefix="my_").create_all(engine)
        yield engine


@pytest.fixture
def locks_engine(engine_of_the_app: Engine) -> Engine:
    return engine_of_the_app

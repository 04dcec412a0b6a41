"""Group Replication with one primary is one server: the others are read-only."""

from __future__ import annotations

import pytest
from sqlalchemy import text

import sqlalchemy_locks as sl
from tests.conftest import CLUSTERS, PLAIN_OF_CLUSTERS, Servers
from tests.fixtures.parties import connected, unused


@pytest.mark.parametrize("name", [CLUSTERS["single_primary"]])
def test_the_primary_shares_and_the_others_refuse(servers: Servers, name: str) -> None:
    primary, secondary, _ = servers.urls(name, PLAIN_OF_CLUSTERS[name])
    with connected(primary) as engine, sl.Locks(engine).shared(unused()) as held:
        with held.session.begin_nested():
            held.session.execute(text("SELECT 1"))
    with connected(secondary) as engine, pytest.raises(sl.NotWritable), sl.Locks(engine).exclusive(unused()):
        pass

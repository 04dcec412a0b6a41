"""``check`` names a pooler that is in between."""

from __future__ import annotations

from typing import Any

import pytest

from sqlalchemy_locks.health import examine
from tests.fixtures.parties import connected


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_check_names_the_pooler(driver: str, through: Any) -> None:
    url, connect_args = through(driver)
    with connected(url, connect_args=connect_args) as engine, engine.connect() as connection:
        (finding,) = (finding for finding in examine(connection) if finding.subject == "pooler")
    assert (finding.level, "PgBouncer" in finding.says) == ("warning", True)

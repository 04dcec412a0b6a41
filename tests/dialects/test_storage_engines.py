"""MySQL and MariaDB keep a table in one of several storage engines, of which some have no transactions."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, text

from sqlalchemy_locks.dialects import backend_for
from tests.fixtures.engines import MakeEngine


def warnings(connection: Connection) -> list[str]:
    findings = backend_for(connection.dialect).findings(connection)
    return [each.says for each in findings if (each.subject, each.level) == ("storage engine", "warning")]


@pytest.mark.parametrize(("name", "kept_by"), [("mysql", "MyISAM"), ("mariadb", "Aria")])
def test_check_warns_of_tables_without_row_locks(engine_to: MakeEngine, name: str, kept_by: str) -> None:
    with engine_to(name).connect() as connection:
        assert not warnings(connection)
        connection.execute(text(f"CREATE TABLE stored_page (id INTEGER PRIMARY KEY) ENGINE={kept_by}"))
        (says,) = warnings(connection)
        connection.execute(text("DROP TABLE stored_page"))
    assert says.startswith(f"stored_page is kept by {kept_by}, which has no row locks")

"""docs/sql.md shows the statements that are executed."""

from __future__ import annotations

import pytest

from tests.conftest import PLAIN, Servers
from tests.docs import sql_page
from tests.docs.test_sql import plain


@pytest.mark.parametrize("name", sql_page.ENGINES)
def test_sql_page_shows_executed_statements(name: str, servers: Servers) -> None:
    engine = sql_page.prepare(servers.fresh(name, PLAIN[name]))
    try:
        now = sql_page.executed(engine)
    finally:
        engine.dispose()
    shown = sql_page.of_page(sql_page.PAGE.read_text(), name)
    assert shown.keys() == now.keys()
    stale = [each for each in now if plain(shown[each]) != plain(now[each])]
    assert stale == [], "run python -m tests.docs.sql_page"
